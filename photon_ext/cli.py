"""The command line: `photon-ext generate`, `photon-ext trace` and `photon-ext info`.

Exit codes: 0 done, 1 the request ended with an error, 2 wrong input or set-up, or stdout cannot be
written (one line on stderr says what to do), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn, TextIO

import photon_ext
from photon_ext import cli_trace
from photon_ext.errors import ModelError, PhotonError

if TYPE_CHECKING:
    from photon_ext.engine import Output, Request
    from photon_ext.observe.live import View
    from photon_ext.observe.meter import MeterSnapshot

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
TOKENIZER_FILE = "tokenizer.json"
# torch has an exception of its own for a GPU's memory only
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


class OutputError(PhotonError):
    """stdout cannot be written."""


class Parser(argparse.ArgumentParser):
    """Says what was wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}; see {self.prog} --help\n")

    def exit(self, status: int = DONE, message: str | None = None) -> NoReturn:
        if message:
            _complain(message.removesuffix("\n"))
        _say("", end="")  # what --help has printed is out, or is told to be lost
        sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    name = "photon-ext"
    try:
        _check_streams()
        arguments = _parser().parse_args(argv)
        name = f"photon-ext {arguments.command}"
        return {"info": _info, "trace": _trace, "generate": _generate}[arguments.command](arguments)
    except (PhotonError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, PhotonError) or _is_out_of_memory(error)):
            raise
        _complain(f"{name}: {_one_line(error, name)}")
        if isinstance(error, OutputError) and sys.stdout is not None:
            _drop(sys.stdout)
        return WRONG
    except BrokenPipeError:  # the reader of our output has left
        _drop(sys.stdout)
        return DONE
    except KeyboardInterrupt:
        _complain("\ninterrupted")
        return INTERRUPTED


def _parser() -> Parser:
    from photon_ext.runtime.row_params import flags

    parser = Parser(
        prog="photon-ext",
        description="Text from a language model, without the idle gap between steps.",
    )
    parser.add_argument(
        "--version", action="version", version=f"photon-ext {photon_ext.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    generate = commands.add_parser("generate", help="generate text from a prompt")
    generate.add_argument("prompt", help="the user's message")
    generate.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), a Hugging Face directory, or a .gguf file",
    )
    generate.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    generate.add_argument(
        "--dtype", help="float32, float16 or bfloat16; by default what suits the model"
    )
    generate.add_argument(
        "--depth",
        type=int,
        default=2,
        help="steps in flight: 2 (default), or 1 for the blocking loop",
    )
    generate.add_argument(
        "--hopper-kernels",
        action=argparse.BooleanOptionalAction,
        help="run the kernels made for Hopper GPUs, or portable ones; by default the former where "
        "they run",
    )
    generate.add_argument(
        "--max-len",
        type=int,
        help="longest prompt and answer, in tokens; by default the model's, up to 4096",
    )
    for name, (kind, help_text, default) in flags().items():
        generate.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=help_text
        )
    generate.add_argument(
        "--raw", action="store_true", help="use the prompt as it stands, without the chat template"
    )
    generate.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead of streaming text",
    )
    generate.add_argument(
        "--meter", action="store_true", help="show on stderr what the engine is doing"
    )
    cli_trace.add_arguments(
        commands.add_parser(
            "trace", help="a timeline of host and device: where the device waits, and for whom"
        )
    )
    commands.add_parser("info", help="versions, devices, build, and what is missing")
    return parser


def _info(_: argparse.Namespace) -> int:
    # here, as in _generate: an interrupt while it is imported is an interrupt like any other
    from photon_ext.info import describe

    _say(describe())
    return DONE


def _generate(arguments: argparse.Namespace) -> int:
    from photon_ext.engine import Engine
    from photon_ext.models.loader import resolve_model
    from photon_ext.observe.live import open_view
    from photon_ext.runtime.row_params import flags
    from photon_ext.sampling import SamplingParams

    params = SamplingParams(**{name: getattr(arguments, name) for name in flags()})
    path = resolve_model(arguments.model)
    if path.is_dir() and not (path / TOKENIZER_FILE).exists():
        raise ModelError(
            f"{path} has no {TOKENIZER_FILE}; copy it there (save_pretrained of the tokenizer)"
        )
    engine = Engine.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        depth=arguments.depth,
        hopper_kernels=arguments.hopper_kernels,
        max_len=arguments.max_len,
        max_rows=1,
    )
    if arguments.hopper_kernels and not (
        engine.device.startswith("cuda") and photon_ext.hopper_runs()
    ):
        _complain(
            f"photon-ext generate: --hopper-kernels changes nothing on {engine.device}; photon-ext "
            "info says which kernels run"
        )
    with engine, open_view(engine.meter, sys.stderr) if arguments.meter else nullcontext() as view:
        request = engine.submit(arguments.prompt, params, raw=arguments.raw)
        if view is not None and view.redraws and sys.stdout.isatty() and not arguments.json:
            _stream_in(view, request)
        elif not arguments.json:
            _stream(request)
        output = request.result()
        stats = engine.stats()
        if not arguments.json:
            _say("")  # before the meter's last line and the summary, where all go to one file
    if arguments.json:
        _say(_as_json(output, stats))
    else:
        _complain(_summary(output, stats))
    if output.error is not None:
        _complain(f"photon-ext generate: {output.error}")
        return FAILED
    return DONE


def _trace(arguments: argparse.Namespace) -> int:
    traced = cli_trace.trace(arguments)
    _say(traced.summary)
    _say("written: " + ", ".join(str(path) for path in traced.written))
    if traced.missing is not None:
        _complain(traced.missing)
    if traced.error is not None:
        _complain(f"photon-ext trace: {traced.error}")
    return DONE if traced.error is None else FAILED


def _stream(request: Request) -> None:
    for event in request.iter():
        _say(event.text, end="")


def _stream_in(view: View, request: Request) -> None:
    """The text as it comes, in a view that redraws the terminal it goes to; when that is closed,
    all of it.
    """
    pieces = []
    try:
        for event in request.iter():
            pieces.append(event.text)
            view.show(event.text)
    finally:
        view.close()
        _say("".join(pieces), end="")


def _summary(output: Output, stats: MeterSnapshot) -> str:
    gap = "not measured" if stats.step_gap_us is None else f"{stats.step_gap_us:.0f} us"
    rate = "-" if output.tokens_per_s is None else f"{output.tokens_per_s:.1f}"
    first = "-" if output.ttft_ms is None else f"{output.ttft_ms:.0f} ms"
    return (
        f"[{len(output.token_ids)} tokens ({output.finish_reason}), {rate} tokens/s, first token "
        f"after {first}, "
        f"step gap {gap} (median), depth {stats.depth}, {stats.device}]"
    )


def _as_json(output: Output, stats: MeterSnapshot) -> str:
    return json.dumps(
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.prompt_tokens,
            "ttft_ms": _rounded(output.ttft_ms, 3),
            "tokens_per_s": _rounded(output.tokens_per_s, 2),
            "step_gap_us": _rounded(stats.step_gap_us, 2),
            "steps": stats.steps,
            "zombie_rows": stats.zombie_rows,
            "depth": stats.depth,
            "device": stats.device,
        }
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY in str(error)
    )


def _one_line(error: BaseException, name: str) -> str:
    text = " ".join(str(error).split())
    lower = "--batch" if name.endswith("trace") else "--max-len"
    return f"out of memory: {text}; lower {lower}" if _is_out_of_memory(error) else text


def _check_streams() -> None:
    """Before anything is written. A stderr that is closed is one that nobody reads.

    Raises:
        OutputError: stdout is closed.
    """
    if sys.stderr is None:  # to print, None would mean stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        raise OutputError("stdout is closed; open it, or send it to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a character that the terminal does not have is no reason to stop
        sys.stdout.reconfigure(errors="replace")


def _say(text: str, end: str = "\n") -> None:
    """Prints to stdout, at once.

    Raises:
        BrokenPipeError: its reader has left. OutputError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"stdout cannot be written ({error.strerror}); send it to where there is room"
        ) from error


def _complain(text: str) -> None:
    """Prints to stderr; where that cannot be written, nobody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """What is written to `stream`, what it still holds included, goes nowhere from here on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
