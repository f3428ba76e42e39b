"""Rows that decode together in an engine, by what they ask for: modes take turns, and each is told
beside the first."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.common import options as cli
from benchmarks.common.models import open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from photon_ext import Engine, SamplingParams, StepOutput
from photon_ext.engine.request_options import RequestOptions
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights

WARM_UP, TAIL = 12, 4  # steps: prompts and the first tokens; the ends
LEAST_STEPS = 2 * (WARM_UP + TAIL)
PROMPT, SPARE = (
    8,
    8,
)  # tokens of a prompt; tokens that an answer may be longer than it was asked for


class Ask(NamedTuple):
    """What one row asks for: parameters, and keywords of `Engine.submit`."""

    params: SamplingParams
    options: Mapping[str, Any] = {}


class Steps(NamedTuple):
    """Means over the steps in which all rows decode: ms of a step, ms that the loop spends on masks
    and tokens, microseconds between two steps (None: not measured), the share of steps that wait
    for masks, and where constraints were kept."""

    ms: float
    work_ms: float
    gap_us: float | None
    split: float
    kept: set[str | None]


def sizes(rows: int, steps: int) -> dict[str, Any]:
    """Options of an engine for so many rows and steps."""
    lengths = {"max_len": PROMPT + steps + SPARE, "chunk": PROMPT * rows}
    return {"max_rows": rows, "buckets": (rows,), **lengths, "prefix_cache": False}


class Decoding:
    """An engine made with `sizes`, and how long its steps take. Answers have to be as long as was
    asked for, or longer."""

    def __init__(self, engine: Engine, rows: int, steps: int) -> None:
        self._engine, self._rows, self._steps = engine, rows, steps
        self._times: list[float] = []
        engine.listen(self._hear)

    def _hear(self, output: StepOutput) -> None:
        if len(output.counts) == self._rows:
            self._times.append(time.perf_counter())

    def run(self, asks: Sequence[Ask]) -> Steps:
        """One run, of as many asks as rows, which all begin together."""
        engine = self._engine
        made = []
        for row, ask in enumerate(asks):
            prompt, options = [1 + row, *range(2, PROMPT + 1)], RequestOptions.of(**ask.options)
            made.append(engine._input.make(prompt, ask.params, False, options))
        before = engine.stats()
        self._times.clear()
        outputs = engine._answers(made)  # what was made is queued at once
        after = engine.stats()
        for output in outputs:
            if output.error is not None or len(output.token_ids) < self._steps:
                told = output.error or output.finish_reason
                raise BenchmarkError(f"an answer ended early: {told}")
        times = self._times[WARM_UP:-TAIL]
        gaps = engine.meter.gaps_us(before.gap_count)[WARM_UP:-TAIL]
        parts = ("commit", "finalize")
        work = sum(after.host_s[part] - before.host_s.get(part, 0.0) for part in parts)
        work -= after.host_wait_s - before.host_wait_s
        steps = after.steps - before.steps
        return Steps(
            (times[-1] - times[0]) / (len(times) - 1) * 1e3,
            work / steps * 1e3,
            fmean(gaps) if gaps else None,
            (after.split_steps - before.split_steps) / steps,
            {output.constraint_on for output in outputs},
        )


def in_turns(modes: Mapping[str, Callable[[], Steps]], rounds: int) -> dict[str, Any]:
    """The medians of each mode's runs, but for a first one, in which grammars are compiled."""
    runs: dict[str, list[Steps]] = {mode: [] for mode in modes}
    for _ in range(1 + rounds):
        for mode, run in modes.items():
            try:
                runs[mode].append(run())
            except BenchmarkError as error:
                raise BenchmarkError(f"{mode}: {error}") from error
    figures: dict[str, Any] = {}
    for mode, found in runs.items():
        first = next(iter(figures.values()), None)
        figures[mode] = _figures(found[1:], first)
    return figures


def _figures(runs: Sequence[Steps], first: dict[str, Any] | None) -> dict[str, Any]:
    """Of one mode, beside the first.

    `idle` is the share of a step in which the device has nothing to do. Where steps wait for masks
    it is not between steps alone: there a step's work counts as that of a step of the first mode.
    """
    ms, work = median(run.ms for run in runs), median(run.work_ms for run in runs)
    steps = [run.ms for run in runs]
    gap = _median(run.gap_us for run in runs)
    busy = None if gap is None else ms - gap / 1e3
    told = {"ms": ms, "least": min(steps), "most": max(steps), "work_ms": work}
    told |= {"gap_us": gap, "split": median(run.split for run in runs)}
    if first is not None and told["split"]:
        busy = first["busy_ms"]
    idle = None if busy is None else max(1 - busy / ms, 0.0)
    return {**told, "busy_ms": busy, "idle": idle, "ratio": ms / (first or told)["ms"]}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def parser(description: str) -> ArgumentParser:
    """A parser with the options that all such benchmarks have."""
    options = cli.parser(description)
    add = options.add_argument
    cli.models_option(options)
    add("--rows", type=cli.integers, help="rows, separated by commas")
    add("--steps", type=cli.positive_integer, help="tokens of each row")
    add("--rounds", type=cli.positive_integer, help="runs of each mode, of which the median counts")
    add("--dtype", choices=cli.DTYPES, help="default: bfloat16, or the file's")
    return options


def check_steps(options: ArgumentParser, args: Namespace) -> None:
    """Ends the process where too few would be left to measure."""
    if args.steps < LEAST_STEPS:
        options.error(f"--steps is {args.steps}; give {LEAST_STEPS} at least")


def open_weights(model: str, args: Namespace) -> tuple[ModelConfig, DecoderWeights]:
    """The model on the device, in the dtype that was asked for."""
    dtype = None if args.dtype is None else cli.DTYPES[args.dtype]
    return open_model(model, dtype, cli.device_of(args.device))


def measure_all(
    benchmark: str, args: Namespace, measure: Callable[[str, int, Namespace], dict[str, Any]]
) -> int:
    """What `main` of such a benchmark does: `measure` gives the modes of a model and rows."""
    result = ResultFile(benchmark, args, args.json)
    for model in args.model:
        for rows in args.rows:
            labels = {"what": benchmark, "model": model, "batch": rows}
            result.measure(labels, partial(measure, model, rows, args))
    for table in tables_of(result.data):
        table.show()
    return 1 if result.failed else 0
