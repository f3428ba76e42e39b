"""`photon-ext generate`: one answer, streamed or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from photon_ext.cli.model import open_engine, sampling_params
from photon_ext.cli.terminal import complain, say
from photon_ext.engine import Engine, Output, Request
from photon_ext.errors import ConfigError, RequestError, describe, shown
from photon_ext.observe.live import View, open_view
from photon_ext.observe.meter import MeterSnapshot

if TYPE_CHECKING:
    from photon_ext.engine.prompts import Prompt
    from photon_ext.sampling import SamplingParams

STDIN = "-"


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    params, prompt = _params(arguments), _prompt(arguments)
    lora = arguments.lora
    slots = {} if lora is None else {"lora_slots": 1, "lora_rank": arguments.lora_rank}
    engine = open_engine(arguments, **slots)
    with engine, open_view(engine.meter, sys.stderr) if arguments.meter else nullcontext() as view:
        if lora is not None:
            engine.load_lora(lora, lora)
        request = engine.submit(
            prompt, params, raw=arguments.raw, timeout_s=arguments.timeout, lora=lora
        )
        if view is not None and view.redraws and sys.stdout.isatty() and not arguments.json:
            _stream_in(view, request)
        elif not arguments.json:
            stream(request)
        output = request.result()
        stats = engine.stats()
        if not arguments.json:
            say("")  # before the meter's last line and the summary, where all go to one file
    if arguments.json:
        say(_as_json(output, stats, engine))
    else:
        complain(_summary(output, stats))
    if output.finish_reason == "timeout":
        complain("photon-ext generate: the answer is not complete: its --timeout has passed")
    elif output.error is not None:
        complain(f"photon-ext generate: {output.error}")
    return 1 if output.finish_reason in ("timeout", "error") else 0


def stream(request: Request) -> None:
    """Prints the text as it comes."""
    for event in request.iter():
        say(event.text, end="")


def _params(arguments: argparse.Namespace) -> SamplingParams:
    """What is asked of the answer, its form included."""
    file, choice = arguments.json_schema, arguments.choice
    return sampling_params(
        arguments,
        json_schema=None if file is None else _read_schema(file),
        regex=arguments.regex,
        choice=choice[0].split(",") if choice is not None and len(choice) == 1 else choice,
    )


def _read_schema(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--json-schema {shown(file)} cannot be read ({describe(error)}); name a UTF-8 file "
            "that holds a JSON schema"
        ) from error


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text = _read_stdin() if arguments.prompt == STDIN else arguments.prompt
    if not text:
        raise RequestError("the prompt is empty; give the user's message")
    if arguments.system is None:
        return str(text)
    if arguments.raw:
        raise RequestError("--system needs the chat template, which --raw leaves out; drop one")
    return [{"role": "system", "content": arguments.system}, {"role": "user", "content": text}]


def _read_stdin() -> str:
    """All of stdin, but for the line end that closes it."""
    if sys.stdin is None:
        raise RequestError("the prompt is -, and stdin is closed; give it as an argument")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is no text ({error}); send it as UTF-8") from error


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
        say("".join(pieces), end="")


def _summary(output: Output, stats: MeterSnapshot) -> str:
    """What is known of it: there is no rate of one token, nor a first token of none."""
    count, rate, first = len(output.token_ids), output.tokens_per_s, output.ttft_ms
    gap = "not measured" if stats.step_gap_us is None else f"{stats.step_gap_us:.0f} us (median)"
    figures = [
        f"{count} {'token' if count == 1 else 'tokens'} ({output.finish_reason})",
        None if rate is None else f"{rate:.1f} tokens/s",
        None if first is None else f"first token after {first:.0f} ms",
        f"step gap {gap}",
        f"depth {stats.depth}",
        stats.device,
    ]
    return f"[{', '.join(figure for figure in figures if figure is not None)}]"


def _as_json(output: Output, stats: MeterSnapshot, engine: Engine) -> str:
    logprobs = [
        {
            "token_id": token,
            "text": engine.token_text(token),
            "logprob": found.sampled,
            "top": [[other, logprob, engine.token_text(other)] for other, logprob in found.top],
        }
        for token, found in zip(output.token_ids, output.logprobs, strict=False)
    ]
    prompt = [{"logprob": found.sampled, "top": found.top} for found in output.prompt_logprobs]
    return json.dumps(
        {
            "text": output.text,
            "token_ids": output.token_ids,
            **({"logprobs": logprobs} if logprobs else {}),
            **({"prompt_logprobs": prompt} if prompt else {}),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
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
