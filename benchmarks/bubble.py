"""What two steps in flight are worth: depth 1 against depth 2, nothing else changed, predicted and observed.

    python -m benchmarks.bubble --model qwen3-0.6b,qwen3-4b,qwen3-8b --long qwen3-8b --json FILE --markdown FILE --plot FILE.png

The engine serves requests that end by a stop token: temperature 1 and a stop set of 1/110 of the vocabulary, so that random weights
generate about 110 tokens each and zombies occur as they would. Predictions come from steady medians of a run of their own, observations
from the wall time of other requests. A row is met where they differ by no more than half a point, or a tenth of the gain; otherwise the
cause is named. A run of few requests per stream shows what the batch's ramp-down does to a short benchmark. `--long` decodes 8,192 tokens
in each of 32 sequences. `--meter-cost` compares steps with the meter on and off.
"""

from __future__ import annotations

import threading
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.common.bubble_plot import plot_gains
from benchmarks.common.gain import Gain, Side, periods
from benchmarks.common.options import (
    DTYPES,
    device_of,
    fast_kernels_option,
    integers,
    names,
    output_file,
    parser,
    running_kernels,
    use_fast_kernels,
)
from benchmarks.common.progress import Progress
from benchmarks.common.pyplot import open_pyplot
from benchmarks.common.result import BenchmarkError, ResultFile, write_text
from benchmarks.common.sampling_time import sampling_ms
from benchmarks.common.serving import LONGEST, Load, Medians, Served, Server, medians, serve
from benchmarks.common.shapes import SHAPES, open_model
from benchmarks.common.table import markdown_table, print_table
from photon_ext.observe.cost_model import StepParts, predict_from_parts
from photon_ext.observe.meter import Meter

CALIBRATION_SEED, OBSERVED_SEED = 1, 1000
UNIFORM = 1e4  # a temperature at which a real model's tokens are as uniform as those of random weights
METER_ROUNDS, METER_TOKENS = 5, 200

# Hugging Face, "Unlocking asynchronicity in continuous batching": 8B, 32 sequences, 8K tokens, H200. Seconds, active share.
PUBLISHED_LONG = (("published: transformers, synchronous", 300.6, 0.760), ("published: transformers, asynchronous", 234.5, 0.994))

PARTS = ("model", "streams", "forward ms", "sampling ms", "period ms", "left over us", "gap us")
GAINS = ("model", "streams", "requests", "blocking ms", "pipelined ms", "L", "formula", "predicted", "observed", "while full", "met")
LONG = ("what", "depth", "total s", "active share", "ms/step", "tokens/s")
METER = ("model", "streams", "ms/step off", "ms/step on", "ratio")


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

    def load(self, streams: int, requests: int) -> Load:
        """Requests of about --length tokens."""
        length = self.args.length
        return Load(streams, requests, self.args.prompt, length, LONGEST * length, self.temperature)

    def gain(self, streams: int) -> dict[str, Any]:
        """Depth 1 against depth 2: medians first, then other requests by wall time; and where --short asks for it, a few of them."""
        load, short = self.load(streams, self.args.requests), self.load(streams, self.args.short)
        with ExitStack() as stack:
            servers = {depth: stack.enter_context(self._server(load, depth)) for depth in (1, 2)}
            found = {depth: periods(self._calibrate(server, streams)) for depth, server in servers.items()}
            gain = self._observe(servers, found, load)
            brief = self._observe(servers, found, short) if self.args.short and streams == max(self.args.streams) else None
        parts = self._parts(load, gain)
        entry = {"parts": parts, **gain.as_dict(), "short": None if brief is None else brief.as_dict()}
        model = StepParts(
            forward_ms=parts["forward_ms"],
            sampling_ms=parts["sampling_ms"],
            bookkeeping_ms=max(0.0, gain.block.periods.decode_ms - parts["device_ms"]),
            overlap=0.0 if self.on_cpu else 1.0,
            dead_ms=gain.pipe.periods.dead_ms,
        )
        before = predict_from_parts(model, gain.work)
        return {**entry, "from_parts": {**vars(model), "gain": before.gain, "verdict": before.verdict}, "verdict": gain.prediction.verdict}

    def long(self, depth: int) -> dict[str, Any]:
        """Long answers: total time, and the share of it in which the device was not idle between steps."""
        args = self.args
        load = Load(args.long_sequences, 1, args.prompt, None, args.long_tokens, self.temperature)
        with self._server(load, depth, timing=True) as server:
            served = self._serve(server, load, OBSERVED_SEED, f"{self.name} long")
        steps = len(served.log.steps)
        return {
            "wall_s": served.log.wall_s,
            "active_share": 1 - served.gap_s / served.log.wall_s,
            "ms_per_step": served.log.wall_s * 1e3 / steps,
            "tokens_per_s": served.tokens_per_s,
            "sequences": args.long_sequences,
            "tokens": args.long_tokens,
            "tokens_in_all": served.tokens,
        }

    def meter_cost(self, streams: int) -> dict[str, Any]:
        """Decode steps with the meter on over the same with it off, in turns."""
        load = Load(streams, 1, self.args.prompt, None, METER_TOKENS, self.temperature)
        times: dict[bool, list[float]] = {True: [], False: []}
        with ExitStack() as stack:
            servers = {metered: stack.enter_context(self._server(load, 2, meter=metered)) for metered in (False, True)}
            for round_ in range(METER_ROUNDS):
                for metered, server in servers.items():
                    found = medians(self._serve(server, load, round_, f"{self.name} meter").log, streams).decode
                    assert found is not None  # a run of METER_TOKENS full steps
                    times[metered].append(found)
        off, on = times[False], times[True]
        ratios = [with_ / without for without, with_ in zip(off, on, strict=True)]
        return {"off_ms": median(off), "on_ms": median(on), "ratio": median(ratios), "rounds": {"off": off, "on": on}}

    def _server(self, load: Load, depth: int, *, timing: bool = False, meter: bool = True) -> Server:
        self.progress.show(f"{self.name} depth {depth}, streams {load.streams}: capture")
        options = {"timing": timing, "meter": meter, "blocking": not self.args.spin, "fast_kernels": use_fast_kernels(self.args)}
        return Server(self.config, self.weights, load, depth, **options)

    def _serve(self, server: Server, load: Load, seed: int, what: str) -> Served:
        with watched(self.progress, server.engine.meter, what):
            return serve(server.engine, load, seed)

    def _calibrate(self, server: Server, streams: int) -> Medians:
        return medians(self._serve(server, self.load(streams, self.args.calibrate), CALIBRATION_SEED, f"{self.name} medians").log, streams)

    def _observe(self, servers: dict[int, Server], found: dict[int, Any], load: Load) -> Gain:
        """Depths take turns, so that what changes on the machine meanwhile meets both."""
        runs: dict[int, list[Served]] = {depth: [] for depth in servers}
        for round_ in range(self.args.rounds):
            for depth, server in servers.items():
                runs[depth].append(self._serve(server, load, OBSERVED_SEED + round_, f"{self.name} depth {depth}"))
        sides = {depth: Side(depth, found[depth], runs[depth]) for depth in servers}
        return Gain(sides[1], sides[2], load.streams)

    def _parts(self, load: Load, gain: Gain) -> dict[str, Any]:
        """What a pipelined step is made of: device time between events, and sampling by itself."""
        calibration = self.load(load.streams, self.args.calibrate)
        with self._server(load, 2, timing=True) as server:
            served = self._serve(server, calibration, CALIBRATION_SEED, f"{self.name} parts")
            gap_us = server.engine.stats().step_gap_us
        device = medians(served.log, load.streams).device
        if device is None:
            raise BenchmarkError("no steady step was timed; use more requests, or longer ones")
        stops = len(load.stop_ids(self.config.vocab))
        sampling = sampling_ms(self.weights.device, load.streams, self.config.vocab, self.weights.dtype, stops, self.temperature)
        period = gain.pipe.periods.decode_ms
        return {
            "forward_ms": max(device - sampling, 1e-6),
            "sampling_ms": sampling,
            "device_ms": device,
            "period_ms": period,
            "left_over_us": (period - device) * 1e3,
            "gap_us": gap_us,
        }


@contextmanager
def watched(progress: Progress, meter: Meter, what: str) -> Iterator[None]:
    """Shows the meter's rates while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            now = meter.snapshot()
            progress.show(f"{what}: {now.tokens} tokens, {now.tokens_per_s:.0f} a second, {now.waiting} requests wait")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        progress.step()


def part_row(entry: dict[str, Any]) -> list[object]:
    """One line of the first table."""
    parts = entry["parts"]
    columns = (parts[name] for name in ("forward_ms", "sampling_ms", "period_ms", "left_over_us", "gap_us"))
    return [entry["model"], entry["streams"], *columns]


def gain_row(entry: dict[str, Any], found: dict[str, Any]) -> list[object]:
    """One line of the second table; `found` is the entry itself, or its short run."""
    named = (found[name] for name in ("formula", "predicted", "observed", "observed_full"))
    shares = [None if value is None else f"{value:+.1%}" for value in named]
    per_stream = found["requests"] // (entry["streams"] * found["rounds"])
    return [
        entry["model"], entry["streams"], f"{per_stream} each", found["block_ms"], found["pipe_ms"], round(found["length"], 1), *shares,
        "yes" if found["met"] else "no",
    ]  # fmt: skip


def remarks(entry: dict[str, Any]) -> Iterator[str]:
    """What has to be said about an entry, besides its figures."""
    label = f"{entry['model']}, {entry['streams']} stream{'s' * (entry['streams'] > 1)}"
    for name, found in (("", entry), (" (short run)", entry["short"])):
        if found is None:
            continue
        if not found["met"]:
            yield f"{label}{name}: {found['cause']}"
        if not found["tokens_equal"]:
            yield f"{label}{name}: depth 1 and depth 2 generated different tokens; gains compare tokens/s"
        if found["stopped"] < 0.9 * found["requests"]:
            yield f"{label}{name}: only {found['stopped']} of {found['requests']} requests met a stop token; zombies are rarer than meant"
    yield f"{label}: {entry['verdict']}"


class Report:
    """Prints tables, and keeps them for --markdown."""

    def __init__(self) -> None:
        self.markdown = ""

    def table(self, title: str, header: tuple[str, ...], rows: list[list[object]]) -> None:
        """A table, unless it is empty."""
        if not rows:
            return
        print(f"\n{title}", flush=True)
        print_table(header, rows)
        self.markdown += f"## {title}\n\n{markdown_table(header, rows)}\n"

    def lines(self, lines: list[str]) -> None:
        """Remarks under a table."""
        print("\n".join(lines), flush=True)
        self.markdown += "".join(f"- {line}\n" for line in lines) + ("\n" if lines else "")


def run_gains(bench: Bench, result: ResultFile, report: Report) -> list[dict[str, Any]]:
    """The first seed's two tables for one model."""
    entries = []
    for streams in bench.args.streams:
        entry = result.measure({"what": "gain", "model": bench.name, "streams": streams}, partial(bench.gain, streams))
        if entry is not None:
            entries.append(entry)
    report.table(f"{bench.name}: a pipelined step, medians", PARTS, [part_row(entry) for entry in entries])
    rows = [gain_row(entry, found) for entry in entries for found in (entry, entry["short"]) if found is not None]
    report.table(f"{bench.name}: depth 2 over depth 1", GAINS, rows)
    report.lines([line for entry in entries for line in remarks(entry)])
    return entries


def run_long(bench: Bench, result: ResultFile, report: Report) -> None:
    """The fourth seed's run, beside its published pair."""
    rows: list[list[object]] = []
    for depth in (1, 2):
        entry = result.measure({"what": "long", "model": bench.name, "depth": depth}, partial(bench.long, depth))
        if entry is not None:
            rows.append([bench.name, depth, entry["wall_s"], f"{entry['active_share']:.1%}", entry["ms_per_step"], entry["tokens_per_s"]])
    if rows:
        rows += [[what, None, seconds, f"{share:.1%}", None, None] for what, seconds, share in PUBLISHED_LONG]
    args = bench.args
    report.table(f"{bench.name}: {args.long_tokens} tokens in each of {args.long_sequences} sequences", LONG, rows)


def run_meter(bench: Bench, result: ResultFile, report: Report) -> None:
    """What the meter costs."""
    rows: list[list[object]] = []
    for streams in bench.args.streams:
        entry = result.measure({"what": "meter", "model": bench.name, "streams": streams}, partial(bench.meter_cost, streams))
        if entry is not None:
            rows.append([bench.name, streams, entry["off_ms"], entry["on_ms"], round(entry["ratio"], 4)])
    report.table(f"{bench.name}: the meter's cost at depth 2", METER, rows)


def open_bench(name: str, args: Namespace, progress: Progress, result: ResultFile) -> Bench | None:
    """None where the model cannot be loaded, which becomes an entry."""
    made: list[Bench] = []

    def load() -> dict[str, Any]:
        made.append(Bench(name, args, progress))
        return {"dtype": str(made[0].weights.dtype).removeprefix("torch."), "temperature": made[0].temperature}

    return made[0] if result.measure({"what": "model", "model": name}, load) is not None else None


def parts_of(args: Namespace) -> int:
    """Runs in all, for the progress bar."""
    gains = 0 if args.no_gain else sum(3 + 2 * args.rounds * (1 + bool(args.short and s == max(args.streams))) for s in args.streams)
    meter = 2 * METER_ROUNDS * len(args.streams) * args.meter_cost
    return len(args.model) * (gains + meter) + 2 * len(args.long)


def arguments(given: list[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", type=names, default=["qwen3-0.6b"], help=f"one or more of {', '.join(SHAPES)}, or a model's path")
    options.add_argument("--streams", type=integers, default=[1, 8, 32], help="sequences that run at once")
    options.add_argument(
        "--requests", type=_positive, default=30, help="requests per stream of the observed run; with 60 the ramp-down hardly shows"
    )
    options.add_argument("--short", type=int, default=1, help="requests per stream of the run that shows the ramp-down; 0: none")
    options.add_argument("--calibrate", type=_positive, default=6, help="requests per stream of the run that the medians come from")
    options.add_argument("--rounds", type=_positive, default=1, help="observed runs per depth, in turns")
    options.add_argument("--length", type=_positive, default=110, help="mean tokens of a request: the stop set is 1/N of the vocabulary")
    options.add_argument("--prompt", type=_positive, default=16, help="tokens of a prompt")
    options.add_argument("--temperature", type=float, help=f"default: 1 for random weights, {UNIFORM:g} for a loaded model")
    options.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 for shapes, the loader's choice for models")
    fast_kernels_option(options)
    options.add_argument("--spin", action="store_true", help="wait for steps by spinning instead of yielding the CPU")
    options.add_argument("--no-gain", action="store_true", help="leave the tables of depth 1 and 2 out")
    options.add_argument("--long", type=names, default=[], help="models for the run of long answers")
    options.add_argument("--long-tokens", type=_positive, default=8192)
    options.add_argument("--long-sequences", type=_positive, default=32)
    options.add_argument("--meter-cost", action="store_true", help="measure steps with the meter on and off")
    options.add_argument("--markdown", type=output_file, metavar="FILE", help="write the tables here")
    options.add_argument("--plot", type=output_file, metavar="FILE", help="write bars as a PNG here (matplotlib)")
    args = options.parse_args(given)
    if args.plot is not None:
        try:
            open_pyplot()  # now, and not after an hour
        except ImportError as error:
            options.error(f"--plot: {error}")
    return args


def _positive(text: str) -> int:
    values: list[int] = integers(text)
    if len(values) != 1:
        raise ArgumentTypeError(f"{text!r} is not one positive integer")
    return values[0]


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    args.kernels = running_kernels(args)
    result, report, gains = ResultFile("bubble", args, args.json), Report(), []
    with Progress(parts_of(args)) as progress:
        for name in dict.fromkeys([*args.model, *args.long]):
            bench = open_bench(name, args, progress, result)
            if bench is None:
                continue
            if name in args.model and not args.no_gain:
                gains += run_gains(bench, result, report)
            if name in args.model and args.meter_cost:
                run_meter(bench, result, report)
            if name in args.long:
                run_long(bench, result, report)
            del bench  # before the next model is made
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if args.markdown is not None:
        write_text(args.markdown, report.markdown)
    if args.plot is not None and gains:
        environment = result.data["environment"]
        plot_gains(gains, args.plot, f"Depth 1 and depth 2 on {environment['gpu'] or environment['cpu']}")
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
