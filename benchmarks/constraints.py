"""What constraints cost a step, beside plain rows of the same engine, in turns.

    python -m benchmarks.constraints [--model qwen3-0.6b] [--rows 1,8,32] [--json FILE]

Every row is sampled at temperature 1 with a seed. What is measured:

    plain       no row has a constraint
    grammar     every row has a JSON schema of its own; 8 masks and more by native threads
    alone       the same, each mask filled by the engine's thread
    one         one row has a schema, the others none
    callable    every row asks a Python function that computes for `--callable-us`

ms/step is the mean over the steps in which all rows decode, of which rounds give the median. `work`
is what the loop spends on masks and tokens in one step (finalize and commit, without its wait). A
grammar needs a tokenizer: the model's own, else that of --tokenizer or SmolLM2's, also for random
weights, whose vocabulary is wider.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import options as cli
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.host import bundled_tokenizer
from photon_ext import Engine, SamplingParams
from photon_ext.engine.output import StepOutput
from photon_ext.models.loader import load_model
from photon_ext.models.tokenizer import Tokenizer
from photon_ext.sampling import from_callable

MODES = ("plain", "grammar", "alone", "one", "callable")
ON_GPU = {"model": ["qwen3-0.6b"], "rows": [1, 8, 32], "steps": 400, "rounds": 5}
ON_CPU = {"model": ["smollm2"], "rows": [1, 8], "steps": 40, "rounds": 3}
WARM_UP, TAIL = 12, 4  # steps: prompts and the first tokens; the ends
PROMPT = 8


def schema(row: int) -> dict[str, Any]:
    """Another one for each row, of answers that do not end within a run."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["red", "green", "blue"]}]
    item = {"type": "object", "properties": {f"a{row}": kinds[row % 3], "b": {"type": "string"}}}
    items = {"anyOf": [kinds[(row + 1) % 3], item]}
    return {"type": "array", "items": {**items}, "minItems": 100_000}


def busy(microseconds: float) -> Callable[[list[int]], range]:
    """A function that computes for so long, and allows the first 200 ids."""

    def allowed(tokens: list[int]) -> range:
        end = time.perf_counter() + microseconds / 1e6
        while time.perf_counter() < end:
            pass
        return range(200)

    return allowed


def params_of(mode: str, rows: int, args: Namespace) -> list[SamplingParams]:
    """Of each row."""
    common = {"max_new_tokens": args.steps, "temperature": 1.0, "ignore_eos": True}

    def of(row: int) -> SamplingParams:
        named: dict[str, Any] = {**common, "seed": row}
        if mode in ("grammar", "alone") or (mode == "one" and row == 0):
            named["json_schema"] = schema(row)
        if mode == "callable":
            named["constraint"] = from_callable(busy(args.callable_us))
        return SamplingParams(**named)

    return [of(row) for row in range(rows)]


class Bench:
    """An engine of so many rows, and how long its steps take."""

    def __init__(self, model: str, rows: int, args: Namespace) -> None:
        self._args, self._rows = args, rows
        dtype = None if args.dtype is None else cli.DTYPES[args.dtype]
        config, weights = open_model(model, dtype, cli.device_of(args.device))
        length = PROMPT + args.steps + 8
        sizes = {"max_rows": rows, "max_len": length, "buckets": (rows,), "chunk": PROMPT * rows}
        tokenizer = tokenizer_of(model, args.tokenizer)
        ends = {*config.eos_ids, tokenizer.eos_id} - {None}  # grammars need one
        config = replace(config, eos_ids=tuple(ends))
        self._engine = Engine.from_weights(config, weights, tokenizer, **sizes, prefix_cache=False)
        self._times: list[float] = []
        self._engine.listen(self._hear)

    def _hear(self, _: StepOutput) -> None:
        self._times.append(time.perf_counter())

    def run(self, mode: str) -> tuple[float, float]:
        """ms/step, and the milliseconds of it that the loop spends on masks and tokens."""
        params = params_of(mode, self._rows, self._args)
        prompts = [[1 + row, *range(2, PROMPT + 1)] for row in range(self._rows)]
        self._engine._loop._masks.enabled = mode != "alone"
        before = self._engine.stats()
        self._times.clear()
        outputs = self._engine.generate(prompts, params)
        after = self._engine.stats()
        for output in outputs:
            if len(output.token_ids) != self._args.steps:
                raise BenchmarkError(f"{mode}: an answer ended early, {output.error}")
        times = self._times[WARM_UP:-TAIL]
        work = sum(
            after.host_s[part] - before.host_s.get(part, 0.0) for part in ("commit", "finalize")
        )
        work -= after.host_wait_s - before.host_wait_s
        steps = after.steps - before.steps
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3, work / steps * 1e3

    def measure(self) -> dict[str, Any]:
        """The figures of each mode; the modes take turns."""
        runs: dict[str, list[tuple[float, float]]] = {mode: [] for mode in self._args.modes}
        for _ in range(1 + self._args.rounds):  # the first compiles grammars, and does not count
            for mode, found in runs.items():
                found.append(self.run(mode))
        figures: dict[str, Any] = {}
        for mode, found in runs.items():
            steps, works = ([run[i] for run in found[1:]] for i in (0, 1))
            first = figures[self._args.modes[0]]["ms"] if figures else median(steps)
            told = {"ms": median(steps), "least": min(steps), "most": max(steps)}
            figures[mode] = {**told, "work_ms": median(works), "ratio": median(steps) / first}
        return {"modes": figures}

    def close(self) -> None:
        self._engine.close()


def tokenizer_of(model: str, given: Path | None) -> Tokenizer:
    """The one that was given; else the model's own, else SmolLM2's."""
    if given is not None:
        return Tokenizer.from_directory(given)
    return (None if model in SHAPES else load_model(model).tokenizer) or bundled_tokenizer()


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    cli.models_option(options)
    add("--rows", type=cli.integers, help="rows, separated by commas")
    add("--modes", type=cli.names, default=list(MODES), help="ratios are to the first of them")
    add("--steps", type=cli.positive_integer, help="tokens of each row")
    add("--rounds", type=cli.positive_integer, help="runs of each mode, of which the median counts")
    add("--callable-us", type=cli.positive_number, default=100.0, help="of the Python function")
    add("--tokenizer", type=Path, metavar="DIR", help="where tokenizer.json is")
    add("--dtype", choices=cli.DTYPES, help="default: bfloat16, or the file's")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        options.error(f"--modes {unknown[0]}: unknown; known are {', '.join(MODES)}")
    if args.steps < 2 * (WARM_UP + TAIL):
        options.error(f"--steps is {args.steps}; give {2 * (WARM_UP + TAIL)} at least")
    return args


def measure(model: str, rows: int, args: Namespace) -> dict[str, Any]:
    """The figures of one engine."""
    bench = Bench(model, rows, args)
    try:
        return bench.measure()
    finally:
        bench.close()


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    result = ResultFile("constraints", args, args.json)
    for model in args.model:
        for rows in args.rows:
            labels = {"what": "constraints", "model": model, "batch": rows}
            result.measure(labels, partial(measure, model, rows, args))
    for table in tables_of(result.data):
        table.show()
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
