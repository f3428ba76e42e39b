"""What two steps in flight are worth: depth 1 against depth 2, nothing else changed, predicted and
observed.

    python -m benchmarks.bubble --model qwen3-0.6b,qwen3-4b,qwen3-8b --long qwen3-8b --json FILE
    --markdown FILE --plot FILE.png

The engine serves requests that end by a stop token: temperature 1 and a stop set of 1/110 of the
vocabulary, so that random weights generate about 110 tokens each and zombies occur as they would.
Predictions come from steady medians of a run of their own, observations from the wall time of other
requests. A row is met where they differ by no more than half a point, or a tenth of the gain;
otherwise the causes are named, and a table shows them: how many steps of each depth, how many
milliseconds, how many points. Steps are timed on the device too (`--no-timing` leaves that out):
where ordinary ones are not like the medians, its events say how much of that is the device's and
how much the host's, whose wake-ups a blocking step contains. A run of few requests per stream shows
what the batch's ramp-down does to a short benchmark. `--long` decodes 8,192 tokens in each of 32
sequences, and says where the device was idle for long. `--meter-cost` compares steps with the meter
and its step gaps on and off.
"""

from __future__ import annotations

import threading
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from benchmarks.common.bubble_plot import plot_results
from benchmarks.common.bubble_tables import bubble_sections, model_sections
from benchmarks.common.calibration import Calibration
from benchmarks.common.gain import Gain, Side, periods
from benchmarks.common.long_gaps import long_gaps
from benchmarks.common.options import (
    DTYPES,
    backend_of,
    backend_option,
    device_of,
    integer_from_zero,
    integers,
    models_option,
    names,
    number_from_zero,
    output_file,
    parser,
    png_file,
    positive_integer,
    running_kernels,
    use_hopper,
)
from benchmarks.common.progress import Progress
from benchmarks.common.pyplot import open_pyplot
from benchmarks.common.result import BenchmarkError, ResultFile, write_text
from benchmarks.common.sampling_time import sampling_ms
from benchmarks.common.serving import LONGEST, Load, Served, Server, serve
from benchmarks.common.shapes import SHAPES, open_model
from benchmarks.common.steady import medians
from benchmarks.common.step_log import StepLog
from photon_ext.observe.cost_model import StepParts, predict_from_parts
from photon_ext.observe.meter import Meter

R = TypeVar("R")
Runs = dict[int, list[R]]
"""By depth, in the order they were made."""
CALIBRATION_SEED, OBSERVED_SEED = 1, 1000
WATCH_S = 2.0  # between looks at the meter, which take the engine's thread a moment
# a temperature at which a real model's tokens are as uniform as those of random weights
UNIFORM = 1e4
METER_ROUNDS, METER_TOKENS = 5, 200

PUBLISHED_LONG = [
    {"what": "published: transformers, synchronous", "wall_s": 300.6, "active_share": 0.760},
    {"what": "published: transformers, asynchronous", "wall_s": 234.5, "active_share": 0.994},
]
"""Hugging Face, "Unlocking asynchronicity in continuous batching": 8B, 32 sequences, 8K tokens,
H200.
"""


class Bench:
    """One model, its engines, and the progress shown meanwhile."""

    def __init__(self, name: str, args: Namespace, progress: Progress) -> None:
        self.name, self.args, self.progress = name, args, progress
        dtype = None if args.dtype is None else DTYPES[args.dtype]
        self.config, self.weights = open_model(name, dtype, device_of(args.device))
        default = 1.0 if name in SHAPES else UNIFORM
        self.temperature = default if args.temperature is None else args.temperature

    @property
    def on_cpu(self) -> bool:
        return self.weights.device.type == "cpu"

    def load(self, streams: int, requests: int, aged: bool = False) -> Load:
        """Requests of about --length tokens."""
        length = self.args.length
        return Load(
            streams, requests, self.args.prompt, length, LONGEST * length, self.temperature, aged
        )

    def gain(self, streams: int) -> dict[str, Any]:
        """Depth 1 against depth 2: medians of runs of their own, other requests by wall time;
        where --short asks for it, a few of them.
        """
        load = self.load(streams, self.args.requests)
        gain, brief = self._measured(load)
        parts = self._parts(load, gain)
        entry = {
            "parts": parts,
            **gain.as_dict(),
            "short": None if brief is None else brief.as_dict(),
        }
        model = StepParts(
            forward_ms=parts["forward_ms"],
            sampling_ms=parts["sampling_ms"],
            bookkeeping_ms=max(0.0, gain.block.periods.decode_ms - parts["device_ms"]),
            overlap=0.0 if self.on_cpu else 1.0,
            dead_ms=gain.pipe.periods.dead_ms,
        )
        before = predict_from_parts(model, gain.work)
        return {
            **entry,
            "from_parts": {**vars(model), "gain": before.gain, "verdict": before.verdict},
            "verdict": gain.prediction.verdict,
        }

    def long(self, depth: int) -> dict[str, Any]:
        """Long answers: total time, the share of it in which the device was not idle between
        steps, and where it was for long.
        """
        args = self.args
        load = Load(args.long_sequences, 1, args.prompt, None, args.long_tokens, self.temperature)
        with self._server(load, depth, timing=True) as server:
            served = self._serve(server, load, OBSERVED_SEED, f"{self.name} long, depth {depth}")
            gap_us = server.engine.stats().step_gap_us
        steps = len(served.log.steps)
        return {
            "wall_s": served.log.wall_s,
            "active_share": 1 - served.gap_s / served.log.wall_s,
            "gap_us": gap_us,
            "long_gaps": long_gaps(served.log),
            "ms_per_step": served.log.wall_s * 1e3 / steps,
            "tokens_per_s": served.tokens_per_s,
            "sequences": args.long_sequences,
            "tokens": args.long_tokens,
            "tokens_in_all": served.tokens,
        }

    def meter_cost(self, streams: int) -> dict[str, Any]:
        """Decode steps with the meter and the step gaps' events over the same without either, in
        turns.
        """
        load = Load(streams, 1, self.args.prompt, None, METER_TOKENS, self.temperature)
        times: dict[bool, list[float]] = {True: [], False: []}
        with ExitStack() as stack:
            servers = {
                metered: stack.enter_context(self._server(load, 2, timing=metered, meter=metered))
                for metered in (False, True)
            }
            for round_ in range(METER_ROUNDS):
                for metered, server in servers.items():
                    found = medians(
                        [self._serve(server, load, round_, f"{self.name} meter").log], streams
                    ).decode
                    assert found is not None  # a run of METER_TOKENS full steps
                    times[metered].append(found)
        off, on = times[False], times[True]
        ratios = [with_ / without for without, with_ in zip(off, on, strict=True)]
        return {
            "off_ms": median(off),
            "on_ms": median(on),
            "ratio": median(ratios),
            "rounds": {"off": off, "on": on},
        }

    def _measured(self, load: Load) -> tuple[Gain, Gain | None]:
        """The gain, and that of the short run.

        Depths take turns, and the runs of the medians lie before and behind what is observed: what
        changes on the machine meets all alike.
        """
        args, streams = self.args, load.streams
        logs: Runs[StepLog] = {1: [], 2: []}
        whole: Runs[Served] = {1: [], 2: []}
        short: Runs[Served] = {1: [], 2: []}
        with ExitStack() as stack:
            servers = {
                depth: stack.enter_context(self._server(load, depth, timing=args.timing))
                for depth in (1, 2)
            }
            self._calibrate(servers, logs, streams)
            for depth in logs:
                # too few steps are an error now, and not after the long runs
                periods(medians(logs[depth], streams), {1: 1.0})
            for _ in range(args.rounds):
                self._observe(servers, whole, load)
                if args.short and streams == max(args.streams):
                    self._observe(servers, short, self.load(streams, args.short))
                self._calibrate(servers, logs, streams)
        found = {depth: Calibration.of(logs[depth], streams) for depth in logs}
        gain, brief = (
            Gain(*(Side(depth, found[depth], runs[depth], streams) for depth in (1, 2)))
            for runs in (whole, short)
        )
        return gain, brief if short[1] else None

    def _server(
        self, load: Load, depth: int, *, timing: bool = False, meter: bool = True
    ) -> Server:
        self.progress.show(f"{self.name} depth {depth}, streams {load.streams}: capture")
        options = {
            "timing": timing,
            "meter": meter,
            "blocking": not self.args.spin,
            "backend": backend_of(self.args),
        }
        return Server(self.config, self.weights, load, depth, **options)

    def _serve(self, server: Server, load: Load, seed: int, what: str) -> Served:
        with watched(self.progress, server.engine.meter, what):
            return serve(server.engine, load, seed)

    def _calibrate(self, servers: dict[int, Server], logs: Runs[StepLog], streams: int) -> None:
        load, seed = (
            self.load(streams, self.args.calibrate, aged=True),
            CALIBRATION_SEED + len(logs[1]),
        )
        for depth, server in _in_turns(servers, len(logs[1])):
            logs[depth].append(
                self._serve(
                    server, load, seed, f"{self.name} x{streams} depth {depth}, medians"
                ).log
            )

    def _observe(self, servers: dict[int, Server], runs: Runs[Served], load: Load) -> None:
        seed = OBSERVED_SEED + len(runs[1])
        for depth, server in _in_turns(servers, len(runs[1])):
            runs[depth].append(
                self._serve(server, load, seed, f"{self.name} x{load.streams} depth {depth}")
            )

    def _parts(self, load: Load, gain: Gain) -> dict[str, Any]:
        """What a pipelined step is made of: device time between events, and sampling by itself."""
        calibration = self.load(load.streams, self.args.calibrate, aged=True)
        with self._server(load, 2, timing=True) as server:
            served = self._serve(server, calibration, CALIBRATION_SEED, f"{self.name} parts")
            gap_us = server.engine.stats().step_gap_us
        device = medians([served.log], load.streams).device
        if device is None:
            raise BenchmarkError("no steady step was timed; use more requests, or longer ones")
        stops = len(load.stop_ids(self.config.vocab))
        logits = load.streams, self.config.vocab, self.weights.dtype
        sampling = sampling_ms(
            self.weights.device, *logits, stops, self.temperature, use_hopper(self.args)
        )
        period = gain.pipe.periods.decode_ms
        return {
            "forward_ms": max(device - sampling, 1e-6),
            "sampling_ms": sampling,
            "device_ms": device,
            "period_ms": period,
            "left_over_us": (period - device) * 1e3,
            "gap_us": gap_us,
        }


def _in_turns(servers: dict[int, Server], round_: int) -> list[tuple[int, Server]]:
    """Depth 1 first, then depth 2 first, and so on: a drift of the machine cancels."""
    return sorted(servers.items(), reverse=bool(round_ % 2))


@contextmanager
def watched(progress: Progress, meter: Meter, what: str) -> Iterator[None]:
    """Shows the meter's rates while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_S):
            now = meter.snapshot()
            progress.show(
                f"{what}: {now.tokens} tokens, {now.tokens_per_s:.0f} a second, {now.waiting} "
                "requests wait"
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        progress.step()


def measure_model(bench: Bench, result: ResultFile) -> None:
    """All that is asked of one model; each row becomes an entry, also where it fails."""
    args, name = bench.args, bench.name
    asked = name in args.model
    for streams in args.streams if asked and not args.no_gain else ():
        result.measure(
            {"what": "gain", "model": name, "streams": streams}, partial(bench.gain, streams)
        )
    for streams in args.streams if asked and args.meter_cost else ():
        result.measure(
            {"what": "meter", "model": name, "streams": streams}, partial(bench.meter_cost, streams)
        )
    for depth in (2, 1) if name in args.long else ():
        result.measure({"what": "long", "model": name, "depth": depth}, partial(bench.long, depth))


def open_bench(name: str, args: Namespace, progress: Progress, result: ResultFile) -> Bench | None:
    """None where the model cannot be loaded, which becomes an entry."""
    made: list[Bench] = []

    def load() -> dict[str, Any]:
        made.append(Bench(name, args, progress))
        return {
            "dtype": str(made[0].weights.dtype).removeprefix("torch."),
            "temperature": made[0].temperature,
        }

    return made[0] if result.measure({"what": "model", "model": name}, load) is not None else None


def models_of(args: Namespace) -> list[str]:
    """The models that something is asked of."""
    steps = [] if args.no_gain and not args.meter_cost else args.model
    return list(dict.fromkeys([*steps, *args.long]))


def parts_of(args: Namespace) -> int:
    """Runs in all, for the progress bar."""
    gains = 0 if args.no_gain else sum(_runs(args, streams) for streams in args.streams)
    meter = 2 * METER_ROUNDS * len(args.streams) * args.meter_cost
    return len(args.model) * (gains + meter) + 2 * len(args.long)


def _runs(args: Namespace, streams: int) -> int:
    """Medians before and behind each round, the round itself, and the parts of a step."""
    observed = 2 if args.short and streams == max(args.streams) else 1
    return 2 * (args.rounds + 1 + args.rounds * observed) + 1


def arguments(given: list[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    models_option(options)
    options.add_argument(
        "--streams", type=integers, default=[1, 8, 32], help="sequences that run at once"
    )
    options.add_argument(
        "--requests",
        type=positive_integer,
        default=30,
        help="requests per stream of the observed run; with 60 the ramp-down hardly shows",
    )
    options.add_argument(
        "--short",
        type=integer_from_zero,
        default=1,
        help="requests per stream of the run that shows the ramp-down; 0: none",
    )
    options.add_argument(
        "--calibrate",
        type=positive_integer,
        default=5,
        help="requests per stream of each run that the medians come from",
    )
    options.add_argument(
        "--rounds", type=positive_integer, default=1, help="observed runs per depth, in turns"
    )
    options.add_argument(
        "--length",
        type=positive_integer,
        default=110,
        help="mean tokens of a request: the stop set is 1/N of the vocabulary",
    )
    options.add_argument("--prompt", type=positive_integer, default=16, help="tokens of a prompt")
    options.add_argument(
        "--temperature",
        type=number_from_zero,
        help=f"default: 1 for random weights, {UNIFORM:g} for a loaded model",
    )
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bfloat16 for shapes, the loader's choice for models",
    )
    backend_option(options)
    options.add_argument(
        "--spin", action="store_true", help="wait for steps by spinning instead of yielding the CPU"
    )
    options.add_argument(
        "--timing",
        action=BooleanOptionalAction,
        default=True,
        help="time steps on the device as well: tells its part of a difference from the host's; 3 "
        "µs a step, at both depths",
    )
    options.add_argument(
        "--no-gain", action="store_true", help="leave the tables of depth 1 and 2 out"
    )
    options.add_argument(
        "--long", type=names, default=[], help="models for the run of long answers"
    )
    options.add_argument("--long-tokens", type=positive_integer, default=8192)
    options.add_argument("--long-sequences", type=positive_integer, default=32)
    options.add_argument(
        "--meter-cost",
        action="store_true",
        help="measure steps with the meter and its step gaps on and off",
    )
    options.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables here"
    )
    options.add_argument(
        "--plot", type=png_file, metavar="FILE", help="write bars as a PNG here (matplotlib)"
    )
    args = options.parse_args(given)
    if not models_of(args):
        options.error(
            "--no-gain: nothing is left to measure; give --meter-cost or --long MODEL with it"
        )
    if args.plot is not None:
        try:
            open_pyplot()  # now, and not after an hour
        except ImportError as error:
            options.error(f"--plot: {error}")
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    args.kernels = running_kernels(args)
    result = ResultFile("bubble", args, args.json)
    if args.long:
        result.set(published=PUBLISHED_LONG)
    with Progress(parts_of(args)) as progress:
        for name in models_of(args):
            bench = open_bench(name, args, progress, result)
            if bench is None:
                continue
            measure_model(bench, result)
            for section in model_sections(result.data, name):
                section.show()
            if args.markdown is not None:
                write_text(
                    args.markdown,
                    "".join(section.markdown() for section in bubble_sections(result.data)),
                )
            del bench  # before the next model is made
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if args.plot is not None:
        plot_results([result.data], args.plot)
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
