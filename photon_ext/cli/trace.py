"""`photon-ext trace`: an engine under the timeline, and what came of it as files and as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from photon_ext.cli.arguments import PROMPT
from photon_ext.cli.terminal import complain, say
from photon_ext.engine import Engine, Output
from photon_ext.engine.options import EngineOptions, choose_device
from photon_ext.errors import ConfigError
from photon_ext.models.layers.buffers import kv_bytes_per_token
from photon_ext.models.loading.loader import load_model
from photon_ext.observe import timeline
from photon_ext.observe.render.save import has_matplotlib
from photon_ext.runtime.runtime import checked_device
from photon_ext.sampling import SamplingParams

WARM_UP_TOKENS = 8
MAX_BATCH = 4096


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    traced = trace(arguments)
    say(traced.summary)
    say("written: " + ", ".join(str(path) for path in traced.written))
    if traced.missing is not None:
        complain(traced.missing)
    if traced.error is not None:
        complain(f"photon-ext trace: {traced.error}")
    return 0 if traced.error is None else 1


class Traced(NamedTuple):
    """What came of it, to be printed: the summary, the files, which file could not be made and why,
    the first answer's error."""

    summary: str
    written: list[Path]
    missing: str | None
    error: str | None


def trace(arguments: argparse.Namespace) -> Traced:
    """Loads, warms up, records, saves.

    Raises:
        PhotonError: as Engine.from_pretrained and generate; ConfigError also where the files cannot
            be written.
    """
    # What cannot be recorded is refused before a model is loaded.
    recording = timeline(stacks=arguments.stacks, nvtx=arguments.nvtx)
    given = arguments.prompt or [PROMPT]
    if not 1 <= arguments.batch <= MAX_BATCH or len(given) > MAX_BATCH:
        raise ConfigError(
            f"batch is {arguments.batch}, of {len(given)} prompts; trace from 1 to {MAX_BATCH} "
            "requests at once"
        )
    _check_directory(Path(arguments.out))
    prompts = [given[index % len(given)] for index in range(max(arguments.batch, len(given)))]
    options = {name: getattr(arguments, name) for name in ("depth", "backend", "kv_dtype")}
    options["max_rows"] = len(prompts)
    EngineOptions(**options)  # a wrong option shows before the model is loaded
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens)
    config, weights, tokenizer = load_model(
        arguments.model,
        arguments.dtype,
        checked_device(choose_device(arguments.device)),
        arguments.quantize,
    )
    with Engine.from_weights(config, weights, tokenizer, **options) as engine:
        engine.generate(
            prompts,
            SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True),
            raw=arguments.raw,
        )
        with recording:
            outputs = engine.generate(prompts, params, raw=arguments.raw)
    read = weights.bytes_per_step
    kv_per_token = kv_bytes_per_token(config, weights.dtype, arguments.kv_dtype)
    kv = round(kv_per_token * mean_context(outputs))
    recording.bytes_per_step = read + kv
    recording.bytes_note = (
        f": {read / 1e6:.1f} of weights, {kv / 1e6:.1f} of keys and values (mean)"
    )
    try:
        written = recording.save(arguments.out)
    except OSError as error:
        raise ConfigError(
            f"--out {arguments.out}: {error}; name a directory that can be written"
        ) from error
    install = "matplotlib is not installed (pip install matplotlib)"
    missing = None if has_matplotlib() else f"no timeline.png: {install}"
    failure = next((output.error for output in outputs if output.error is not None), None)
    return Traced(recording.report.text(), written, missing, failure)


def mean_context(outputs: Sequence[Output]) -> float:
    """Tokens whose keys and values a decode step reads, of all its rows, on average over the steps.

    The requests began together. A row attends to its prompt, to what it has answered before, and to
    itself.
    """
    read = steps = 0
    for output in outputs:
        mine = max(0, len(output.token_ids) - 1)  # the first token is the prefill's
        read += mine * output.prompt_tokens + mine * (mine + 1) // 2
        steps = max(steps, mine)
    return read / max(steps, 1)


def _check_directory(path: Path) -> None:
    """Before minutes of work: the files can be written. It leaves no file behind."""
    try:
        in_the_way = next(
            (part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None
        )
        if in_the_way is not None:
            raise ConfigError(
                f"--out {path}: {in_the_way} is a file; name a directory, which is made if need be"
            )
        path.mkdir(parents=True, exist_ok=True)
        for name in ("trace.json", "timeline.html", "summary.txt", "summary.json", "timeline.png"):
            file = path / name
            is_new = not file.exists()
            with open(file, "ab"):
                pass
            if is_new:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path}: {error}; name a directory that can be written") from error
