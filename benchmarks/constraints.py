"""What constraints cost a step, beside plain rows of the same engine, in turns.

    python -m benchmarks.constraints [--model qwen3-0.6b] [--rows 1,8,32] [--json FILE]

Every row is sampled at temperature 1 with a seed. What is measured:

    plain       no row has a constraint
    device      every row has a regular expression as an automaton on the device, four different
    grammar     every row has a JSON schema of its own; 8 masks and more by native threads
    alone       the same, each mask filled by the engine's thread
    one         one row has a schema, the others none
    callable    every row asks a Python function that computes for `--callable-us`

ms/step is the mean over the steps in which all rows decode, of which rounds give the median. `work`
is what the loop spends on masks and tokens in one step (finalize and commit, without its wait),
`split` the share of steps that wait for masks, `idle` that of a step in which the device has
nothing to do (in steps that wait: what they take longer than the work of plain ones). A grammar
needs a tokenizer: the model's own, else that of --tokenizer or SmolLM2's, also for random weights,
whose vocabulary is wider.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import options as cli
from benchmarks.common import turns
from benchmarks.common.models import SHAPES
from benchmarks.common.result import BenchmarkError
from benchmarks.common.turns import Ask, Decoding, Steps, in_turns, sizes
from benchmarks.host import bundled_tokenizer
from photon_ext import Engine, SamplingParams
from photon_ext.models.loading.loader import load_model
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.sampling import from_callable

MODES = ("plain", "device", "grammar", "alone", "one", "callable")
ON_GPU = {"model": ["qwen3-0.6b"], "rows": [1, 8, 32], "steps": 400, "rounds": 5}
ON_CPU = {"model": ["smollm2"], "rows": [1, 8], "steps": 40, "rounds": 3}


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


def expression(row: int, steps: int) -> str:
    """One of four: records that go on until a name is nothing but so many Qs, which are one token
    each."""
    record = rf'\{{"a{row % 4}":"[a-z ]{{1,20}}","b":[1-9][0-9]{{0,2}},"c":(true|false)\}}'
    return rf'({record},)*\{{"a{row % 4}":"Q{{{steps}}}"\}}'


def asks_of(mode: str, rows: int, args: Namespace) -> list[Ask]:
    """Of each row."""
    common = {"max_new_tokens": args.steps, "temperature": 1.0, "ignore_eos": True}

    def of(row: int) -> Ask:
        named: dict[str, Any] = {**common, "seed": row}
        if mode in ("grammar", "alone") or (mode == "one" and row == 0):
            named["json_schema"] = schema(row)
        if mode == "device":
            named["regex"] = expression(row, args.steps)
        if mode == "callable":
            named["constraint"] = from_callable(busy(args.callable_us))
        return Ask(SamplingParams(**named))

    return [of(row) for row in range(rows)]


class Bench:
    """An engine of so many rows."""

    def __init__(self, model: str, rows: int, args: Namespace) -> None:
        self._args, self._rows = args, rows
        config, weights = turns.open_weights(model, args)
        tokenizer = tokenizer_of(model, args.tokenizer)
        ends = {*config.eos_ids, tokenizer.eos_id} - {None}  # grammars need one
        config = replace(config, eos_ids=tuple(ends))
        self.engine = Engine.from_weights(config, weights, tokenizer, **sizes(rows, args.steps))
        self._decoding = Decoding(self.engine, rows, args.steps)

    def run(self, mode: str) -> Steps:
        self.engine._loop._masks.enabled = mode != "alone"
        found = self._decoding.run(asks_of(mode, self._rows, self._args))
        if mode == "device" and found.kept != {"device"}:
            raise BenchmarkError(f"the device does not keep its constraints: {found.kept}")
        return found

    def measure(self) -> dict[str, Any]:
        """The figures of each mode; the modes take turns."""
        runs = {mode: partial(self.run, mode) for mode in self._args.modes}
        return {"modes": in_turns(runs, self._args.rounds)}


def tokenizer_of(model: str, given: Path | None) -> Tokenizer:
    """The one that was given; else the model's own, else SmolLM2's."""
    if given is not None:
        return Tokenizer.from_directory(given)
    return (None if model in SHAPES else load_model(model).tokenizer) or bundled_tokenizer()


def arguments(given: list[str] | None) -> Namespace:
    options = turns.parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--modes", type=cli.names, default=list(MODES), help="ratios are to the first of them")
    add("--callable-us", type=cli.positive_number, default=100.0, help="of the Python function")
    add("--tokenizer", type=Path, metavar="DIR", help="where tokenizer.json is")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        options.error(f"--modes {unknown[0]}: unknown; known are {', '.join(MODES)}")
    turns.check_steps(options, args)
    return args


def measure(model: str, rows: int, args: Namespace) -> dict[str, Any]:
    """The figures of one engine."""
    bench = Bench(model, rows, args)
    with bench.engine:
        return bench.measure()


def main(given: list[str] | None = None) -> int:
    return turns.measure_all("constraints", arguments(given), measure)


if __name__ == "__main__":
    sys.exit(main())
