"""The arguments of the commands."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn, get_args

import photon_ext
from photon_ext.checks import Activations, Backend, KvDtype, check_seconds
from photon_ext.cli.terminal import complain, say
from photon_ext.models.kernel_plan import GPUS
from photon_ext.models.requantize import CHOICES
from photon_ext.models.shapes import NAMED_SHAPES

WRONG = 2
PROMPT = "Why is the sky blue?"
CHAT_TOKENS = 512
NOT_IN_CHATS = ("logprobs", "prompt_logprobs")


class Parser(argparse.ArgumentParser):
    """Says what was wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}; see {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            complain(message.removesuffix("\n"))
        say("", end="")  # what --help has printed is out, or is told to be lost
        sys.exit(status)


def make_parser() -> Parser:
    """The parser of `photon-ext`: `command` says which."""
    parser = Parser(
        prog="photon-ext",
        description="Text from a language model, without the idle gap between steps.",
    )
    parser.add_argument(
        "--version", action="version", version=f"photon-ext {photon_ext.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_generate(commands.add_parser("generate", help="generate text from a prompt"))
    _add_chat(commands.add_parser("chat", help="talk with a model"))
    _add_trace(
        commands.add_parser(
            "trace", help="a timeline of host and device: where the device waits, and for whom"
        )
    )
    _add_serve(
        commands.add_parser("serve", help="an HTTP port that speaks OpenAI's and Anthropic's APIs")
    )
    _add_bench(commands.add_parser("bench", help="traffic against a server, and what it took"))
    _add_info(commands.add_parser("info", help="versions, devices, build, and what is missing"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the user's message; - reads it from stdin")
    _add_engine(parser)
    _add_answer(parser, max_new_tokens=128)
    parser.add_argument(
        "--raw", action="store_true", help="use the prompt as it stands, without the chat template"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end an unfinished answer after so long, from when the model is loaded, with exit "
        "code 1",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead of streaming text",
    )
    parser.add_argument(
        "--meter", action="store_true", help="show on stderr what the engine is doing"
    )
    parser.add_argument("--lora", metavar="DIR", help="run an adapter of PEFT from this directory")
    parser.add_argument(
        "--lora-rank", type=int, default=64, help="the largest rank it may have (default 64)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", metavar="FILE", help="the answer is JSON of the schema in this file"
    )
    form.add_argument("--regex", help="the answer is matched by this regular expression")
    form.add_argument(
        "--choice",
        action="append",
        metavar="A,B",
        help="the answer is one of these texts; given more than once, each is one text, commas and "
        "all",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="talk with a server that has OpenAI's endpoints, such as http://localhost:8000, in "
        "place of a model here; --model is then one of its own (default: its first), and what is "
        "not set is as the server has it",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="that the server asks for; by default the first in the environment variable "
        "PHOTON_API_KEY",
    )
    _add_engine(parser)
    _add_answer(parser, CHAT_TOKENS, is_chat=True)
    parser.set_defaults(model=None)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        required=True,
        type=_directory,
        metavar="DIR",
        help="where the files go; it is made if need be",
    )
    _add_engine(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"may be given more than once (default: {PROMPT!r})",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="longest answer, in tokens (default 64)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, help="requests at once; prompts are repeated (default 1)"
    )
    parser.add_argument(
        "--raw", action="store_true", help="use prompts as they stand, without the chat template"
    )
    parser.add_argument("--stacks", action="store_true", help="record Python functions, too (slow)")
    parser.add_argument("--nvtx", action="store_true", help="mark the phases as NVTX ranges")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from photon_ext.cli.engine_flags import add_engine_flags
    from photon_ext.serve.settings import TOOL_FORMATS, ServeSettings

    parser.add_argument("--host", default="127.0.0.1", help="by default 127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=8000, help="by default 8000; 0 takes one that is free"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="requests have to bring it; may be given more than once. By default those in the "
        "environment variable PHOTON_API_KEY, with spaces between",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="how requests name the model; may be given more than once, the first is in answers",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an adapter of PEFT, which requests name as a model; may be given more than once",
    )
    parser.add_argument(
        "--lora-dir", metavar="DIR", help="requests may load adapters that are children of it"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a template of Jinja instead of the model's own"
    )
    parser.add_argument(
        "--tool-parser",
        choices=TOOL_FORMATS,
        help="how the model writes calls of tools; by default as its chat template says",
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=ServeSettings.max_body,
        metavar="BYTES",
        help=f"of a request's body (default {ServeSettings.max_body})",
    )
    parser.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one line of JSON for each request, on stderr",
    )
    parser.add_argument(
        "--http-workers",
        type=int,
        metavar="N",
        help="HTTP processes; by default a fourth of the cores, up to 4",
    )
    parser.add_argument(
        "--app",
        default=ServeSettings.app,
        metavar="MODULE:FUNCTION",
        help="an ASGI application of your own around the engine: what makes it of a client and "
        "settings, see photon_ext.serve",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="all in one process, for debugging: a step is late where HTTP is spoken",
    )
    seconds: dict[str, Any] = {"type": _seconds, "metavar": "SECONDS"}
    parser.add_argument(
        "--drain-timeout",
        default=60.0,
        help="how long requests in flight may go on after SIGTERM (default 60)",
        **seconds,
    )
    parser.add_argument(
        "--engine-timeout",
        default=30.0,
        help="an engine that gives no sign of life for so long is ended (default 30)",
        **seconds,
    )
    parser.add_argument(
        "--form-timeout",
        default=5.0,
        help="how long the form of an answer may take to compile (default 5)",
        **seconds,
    )
    _add_model(parser)
    add_engine_flags(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", help="of a server that speaks OpenAI's API, without /v1: http://localhost:8000")
    add("--model", help="as the server names it; by default the first that it lists")
    add(
        "--api-key",
        metavar="KEY",
        help="by default the first in the environment variable PHOTON_API_KEY",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--streams",
        default="1,8,32",
        metavar="N,N",
        help="requests that run at any time, one run for each number (default 1,8,32)",
    )
    load.add_argument(
        "--rate",
        metavar="R,R",
        help="instead: requests that arrive in a second (Poisson), whatever runs; burst: all at "
        "once. One run for each",
    )
    add(
        "--requests",
        type=int,
        metavar="N",
        help="of a run; by default four for each stream, or 256 by the clock",
    )
    lengths = "tokens: 160, 32-1024 (any alike), or 16-2048:160 (lognormal, with that median)"
    add("--prompt", default="160", metavar="TOKENS", help=f"{lengths}; default 160")
    add("--answer", default="256", metavar="TOKENS", help="the same of answers; default 256")
    add(
        "--ids",
        default="1000-30000",
        metavar="LOW-HIGH",
        help="prompts are random token ids from here (default 1000-30000)",
    )
    add("--text", action="store_true", help="prompts are words instead, about a token each")
    add("--chat", action="store_true", help="ask /v1/chat/completions, which takes words alone")
    add(
        "--any-length",
        action="store_true",
        help="answers may end early: for servers that do not know ignore_eos",
    )
    add(
        "--clients",
        type=int,
        metavar="N",
        help="client processes at most; by default half of the cores, up to 8",
    )
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default 0)")
    add(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="of an answer (default 600)",
    )
    add("--json", metavar="FILE", help="write all figures there, too")
    add("--plot", metavar="FILE", help="and a PNG of them; needs matplotlib")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    plan = parser.add_argument_group("which kernels the steps of a model run")
    plan.add_argument(
        "--plan",
        metavar="MODEL",
        help="print that instead: of smollm2, a Hugging Face directory, a .gguf file, or "
        + ", ".join(NAMED_SHAPES),
    )
    plan.add_argument(
        "--device", choices=GPUS, help="of this GPU; by default of the one that is here, else h200"
    )
    plan.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="by default what generate takes"
    )
    plan.add_argument(
        "--quantize",
        choices=CHOICES,
        help="weights, as generate takes it; by default as on a GPU that has room for all of them",
    )
    plan.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        help="keys and values; by default of the dtype of the model",
    )
    plan.add_argument(
        "--activations",
        choices=get_args(Activations),
        help="what linears of weights in fp8 read in steps of many tokens; by default the dtype of "
        "the model",
    )
    plan.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="which kernels are asked for; by default hopper, where they run",
    )
    plan.add_argument("--exact", action="store_true", help="of an engine with exact=True")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), a Hugging Face directory, a .gguf file, or the id of a model of "
        "the Hugging Face Hub, which is downloaded unless its cache has it",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", help="float32, float16 or bfloat16; by default what suits the model"
    )
    parser.add_argument(
        "--quantize",
        choices=CHOICES,
        help="weights in memory: stored (as in the file, or its codes as fast kernels read them), "
        "none (all in the dtype), or rounded to fp8 or int4; by default stored, but none on a GPU "
        "with room for it and no fast kernels for what is stored",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--depth",
        type=int,
        default=2,
        help="steps in flight: 2 (default), or 1 for the blocking loop",
    )
    parser.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="which kernels run; by default hopper, where they run",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        help="keys and values in fp8; by default in the dtype of the model",
    )


def _add_answer(
    parser: argparse.ArgumentParser, max_new_tokens: int, is_chat: bool = False
) -> None:
    """`is_chat`: what is not given is None, as a server may have defaults of its own."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the user's")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be given more than once",
    )
    parser.add_argument(
        "--max-len",
        type=int,
        help="longest prompt and answer, in tokens; by default the model's, up to 4096",
    )
    from photon_ext.row_params import flags

    for name, (kind, told, default) in flags(max_new_tokens=max_new_tokens).items():
        if is_chat and name in NOT_IN_CHATS:
            continue
        default = None if is_chat else default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=told)


def _seconds(text: str) -> float:
    try:
        return check_seconds("it", float(text), "seconds >= 0")
    except ValueError as error:  # a ConfigError is one
        raise argparse.ArgumentTypeError(str(error)) from error


def _directory(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory")
    return text
