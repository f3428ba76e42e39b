"""What two steps in flight are worth: depth 1 against depth 2, predicted and observed.

    python -m benchmarks.bubble --model qwen3-0.6b,qwen3-4b --long qwen3-8b --json FILE

The engine serves requests that end by a stop token: temperature 1 and a stop set of 1/110 of the
vocabulary, so that random weights generate about 110 tokens each. Predictions come from steady
medians of runs of their own, observations from the wall time of other requests. A row is met where
they differ by at most half a point or a tenth of the gain. With `--answer N` all answers are of N
tokens, and end by their cap: `--answer 3 --prompt 500`. `--long` decodes 8,192 tokens in each of 32
sequences. `--meter-cost` compares steps with the meter and its step gaps on and off. On a CPU the
sizes are small: about a minute. `benchmarks.report FILE` shows the tables of a result.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.attribution.gain import Gain, Side, periods
from benchmarks.attribution.serving import LONGEST, Load, Served, open_server, serve
from benchmarks.attribution.steady import medians
from benchmarks.attribution.steps import StepLog
from benchmarks.common import options as cli
from benchmarks.common.models import SHAPES, open_model
from benchmarks.common.result import ResultFile
from benchmarks.common.result_tables import tables_of
from photon_ext.engine import Engine

CALIBRATION_SEED, OBSERVED_SEED = 1, 1000
UNIFORM = 1e4  # a temperature at which a real model's tokens are as uniform as random weights'
METER_ROUNDS, METER_TOKENS = 5, 200
ON_GPU = {
    "model": ["qwen3-0.6b"],
    "streams": [1, 8, 32],
    "requests": 30,
    "calibrate": 5,
    "length": 110,
    "long_tokens": 8192,
    "long_sequences": 32,
}
ON_CPU = {
    "model": ["small"],
    "streams": [1, 4],
    "requests": 8,
    "calibrate": 4,
    "length": 24,
    "long_tokens": 256,
    "long_sequences": 2,
}
PUBLISHED_LONG = [
    {"what": "published: transformers, synchronous", "wall_s": 300.6, "active_share": 0.760},
    {"what": "published: transformers, asynchronous", "wall_s": 234.5, "active_share": 0.994},
]
"""Hugging Face, "Unlocking asynchronicity in continuous batching": 8B, 32 sequences of 8K, H200."""


class Bench:
    """One model and its engines."""

    def __init__(self, name: str, args: Namespace, result: ResultFile) -> None:
        self.name, self.args, self._progress = name, args, result.progress
        dtype = None if args.dtype is None else cli.DTYPES[args.dtype]
        self.config, self.weights = open_model(name, dtype, cli.device_of(args.device))
        self.temperature = 1.0 if name in SHAPES else UNIFORM

    def gain(self, streams: int) -> dict[str, Any]:
        """Depth 1 against depth 2.

        Depths take turns, and the runs of the medians lie before and behind what is observed:
        what changes on the machine meets all alike.
        """
        args = self.args
        load = self._load(streams, args.requests)
        full = streams if load.prompt_steps is None else 1
        logs: dict[int, list[StepLog]] = {1: [], 2: []}
        runs: dict[int, list[Served]] = {1: [], 2: []}
        with ExitStack() as stack:
            engines = {
                depth: stack.enter_context(self._server(load, depth, timing=True))
                for depth in (1, 2)
            }
            self._calibrate(engines, logs, streams)
            for depth in logs:
                periods(medians(logs[depth], full))  # too few steps: an error now
            for round_ in range(args.rounds):
                for depth, engine in _in_turns(engines, round_):
                    seed = OBSERVED_SEED + round_
                    runs[depth].append(self._serve(engine, load, seed, f"depth {depth}"))
                self._calibrate(engines, logs, streams)
        given = streams, load.prompt_steps
        sides = (Side(d, medians(logs[d], full), runs[d], *given) for d in (1, 2))
        return Gain(*sides).as_dict()

    def long(self, depth: int) -> dict[str, Any]:
        """Long answers: total time, and its share in which the device was not idle."""
        args = self.args
        sequences, tokens = args.long_sequences, args.long_tokens
        load = Load(sequences, 1, args.prompt, None, tokens, self.temperature)
        with self._server(load, depth, timing=True) as engine:
            served = self._serve(engine, load, OBSERVED_SEED, f"long, depth {depth}")
            gap_us = engine.stats().step_gap_us
        wall_s = served.log.wall_s
        return {
            "wall_s": wall_s,
            "active_share": 1 - served.gap_s / wall_s,
            "gap_us": gap_us,
            "ms_per_step": wall_s * 1e3 / len(served.log.steps),
            "tokens_per_s": served.tokens / wall_s,
            "sequences": sequences,
            "tokens": tokens,
            "tokens_in_all": served.tokens,
        }

    def meter_cost(self, streams: int) -> dict[str, Any]:
        """Decode steps with the meter and the step gaps' events over those without, in turns."""
        load = Load(streams, 1, self.args.prompt, None, METER_TOKENS, self.temperature)
        times: dict[bool, list[float]] = {True: [], False: []}
        with ExitStack() as stack:
            engines = {
                metered: stack.enter_context(self._server(load, 2, timing=metered, meter=metered))
                for metered in (False, True)
            }
            for round_ in range(METER_ROUNDS):
                for metered, engine in engines.items():
                    log = self._serve(engine, load, round_, f"meter {metered}").log
                    found = medians([log], streams).decode
                    assert found is not None  # a run of METER_TOKENS full steps
                    times[metered].append(found)
        off, on = times[False], times[True]
        ratio = median(with_ / without for without, with_ in zip(off, on, strict=True))
        rounds = {"off": off, "on": on}
        return {"off_ms": median(off), "on_ms": median(on), "ratio": ratio, "rounds": rounds}

    def _load(self, streams: int, requests: int) -> Load:
        """Requests of about --length tokens, or of --answer."""
        length, prompt, answer = self.args.length, self.args.prompt, self.args.answer
        if answer is not None:
            return Load(streams, requests, prompt, None, answer, self.temperature)
        return Load(streams, requests, prompt, length, LONGEST * length, self.temperature)

    def _calibrate(
        self, engines: dict[int, Engine], logs: dict[int, list[StepLog]], streams: int
    ) -> None:
        """A run of each depth whose medians count."""
        load, round_ = self._load(streams, self.args.calibrate), len(logs[1])
        for depth, engine in _in_turns(engines, round_):
            seed = CALIBRATION_SEED + round_
            logs[depth].append(self._serve(engine, load, seed, f"medians, depth {depth}").log)

    def _server(self, load: Load, depth: int, **options: bool) -> AbstractContextManager[Engine]:
        settings = {"blocking": not self.args.spin, "backend": cli.backend_of(self.args), **options}
        return open_server(self.config, self.weights, load, depth, **settings)

    def _serve(self, engine: Engine, load: Load, seed: int, what: str) -> Served:
        self._progress.show(f"bubble: {self.name}, streams {load.streams}, {what}, run {seed}")
        return serve(engine, load, seed)


def _in_turns(engines: dict[int, Engine], round_: int) -> list[tuple[int, Engine]]:
    """Depth 1 first, then depth 2 first, and so on: a drift of the machine cancels."""
    return sorted(engines.items(), reverse=bool(round_ % 2))


def measure_model(name: str, args: Namespace, result: ResultFile) -> None:
    """All that is asked of one model; each row becomes an entry, also where it fails."""
    made: list[Bench] = []

    def load() -> dict[str, Any]:
        made.append(Bench(name, args, result))
        dtype = str(made[0].weights.dtype).removeprefix("torch.")
        return {"dtype": dtype, "temperature": made[0].temperature}

    if result.measure({"what": "model", "model": name}, load) is None:
        return
    bench, asked = made[0], name in args.model
    for streams in args.streams if asked and not args.no_gain else ():
        labels = {"what": "gain", "model": name, "streams": streams}
        result.measure(labels, partial(bench.gain, streams))
    for streams in args.streams if asked and args.meter_cost else ():
        labels = {"what": "meter", "model": name, "streams": streams}
        result.measure(labels, partial(bench.meter_cost, streams))
    for depth in (2, 1) if name in args.long else ():
        labels = {"what": "long", "model": name, "depth": depth}
        result.measure(labels, partial(bench.long, depth))


def models_of(args: Namespace) -> list[str]:
    """The models that something is asked of."""
    steps = [] if args.no_gain and not args.meter_cost else args.model
    return list(dict.fromkeys([*steps, *args.long]))


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    cli.models_option(options)
    number, add = cli.positive_integer, options.add_argument
    add("--streams", type=cli.integers, help="sequences that run at once")
    add("--requests", type=number, help="requests per stream of the observed run")
    add("--calibrate", type=number, help="requests per stream of each run for the medians")
    add("--rounds", type=number, default=1, help="observed runs per depth, in turns")
    add("--length", type=number, help="mean tokens of a request: the stop set is 1/N of the ids")
    add("--answer", type=number, help="tokens of all answers, which then end by their cap")
    add("--prompt", type=number, default=16, help="tokens of a prompt")
    add(
        "--dtype", choices=cli.DTYPES, help="default: bfloat16 for shapes, a model's own for models"
    )
    cli.backend_option(options)
    add("--spin", action="store_true", help="wait for steps by spinning")
    add("--no-gain", action="store_true", help="leave the tables of depth 1 and 2 out")
    add("--long", type=cli.names, default=[], help="models for the run of long answers")
    add("--long-tokens", type=number)
    add("--long-sequences", type=number)
    add("--meter-cost", action="store_true", help="measure steps with the meter on and off")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    if not models_of(args):
        options.error("--no-gain: nothing is left to measure; give --meter-cost or --long MODEL")
    args.kernels = cli.running_kernels(args)
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    result = ResultFile("bubble", args, args.json)
    if args.long:
        result.set(published=PUBLISHED_LONG)
    for name in models_of(args):
        measure_model(name, args, result)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for table in tables_of(result.data):
        table.show()
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
