"""Steady decode: ms/step against the read floor of the same run, step gap and node gap, and where
the host's time goes.

    python -m benchmarks.decode --model qwen3-0.6b --batches 1,8,32 --depth 1,2 --json FILE

A model is a named shape with random weights, a model directory, a .gguf file or "smollm2". Every
figure comes from a window of its own, so that what is added to see one does not slow another: plain
steps for ms/step, the host's split, a second pipeline with timing events for the step gap, and on
CUDA, after everything else, a profile for the node gap. Beside it stands what
benchmarks.common.step_time predicts from the floor and the number of kernels, and what each kernel
then costs beyond the floor (us/node). `--timeline-cost` compares steps with the checks for a
timeline, while none is recorded, and without. Use one process per model where a crash must not take
others along.
"""

from __future__ import annotations

import resource
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.common.bare_probe import bare_probe
from benchmarks.common.host_meter import host_split
from benchmarks.common.numbers import summary
from benchmarks.common.options import (
    DTYPES,
    backend_option,
    device_of,
    integers,
    models_option,
    parser,
    positive_integer,
    positive_number,
    running_kernels,
    use_hopper,
)
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.session import Memory, Session, agree, random_prompts
from benchmarks.common.shapes import open_model
from benchmarks.common.step_time import NODE_US, Machine, StepShape, predict_step
from benchmarks.common.table import print_table
from benchmarks.common.trace import idle, record
from benchmarks.floor import bytes_of, read_floor

TRACED_STEPS = 12
CHECKED_STEPS = 16
TIMELINE_ROUNDS, TIMELINE_STEPS = 20, 40  # pairs of windows, and the steps of each
ENGINE_CHUNK = 256  # the default of Pipeline, for the memory report

HEADER = (
    "model",
    "B",
    "depth",
    "context",
    "ms/step",
    "predicted",
    "tok/s",
    "floor ms",
    "share",
    "us/node",
    "gap us",
    "p99",
    "plan",
    "launch",
    "commit",
    "deliver",
    "wait",
    "quiet",
)


class Bench:
    """One model on one device, and the token streams seen so far: they must not depend on depth."""

    def __init__(self, name: str, args: Namespace, bytes_per_s: float) -> None:
        device = device_of(args.device)
        self.name = name
        self.config, self.weights = open_model(
            name, None if args.dtype is None else DTYPES[args.dtype], device
        )
        self.steps, self.warm_up, self.seconds = args.steps, args.warm_up, args.seconds
        self.blocking = not args.spin
        self.fast = use_hopper(args)
        self.prompt_len = max(1, args.context - self.warm_up - self.steps // 2)
        self.bytes_per_s = bytes_per_s
        self._tokens: dict[int, list[list[int]]] = {}

    @property
    def on_cuda(self) -> bool:
        return self.weights.device.type == "cuda"

    @property
    def dtype(self) -> str:
        return str(self.weights.dtype).removeprefix("torch.")

    def check(self) -> dict[str, Any]:
        """Equal prompts give equal rows, and depths equal tokens; logits are finite.

        Raises BenchmarkError.
        """
        prompts = random_prompts(self.config.vocab, 3, 24)
        streams = []
        for depth in (1, 2):
            with Session(
                self.config,
                self.weights,
                prompts,
                CHECKED_STEPS + 4,
                depth=depth,
                exact=True,
                fast=self.fast,
            ) as session:
                session.prefill()
                session.run(CHECKED_STEPS - 2)
                session.check()
                streams.append([session.tokens[row.index] for row in session.rows])
                if not session.rows_equal():
                    raise BenchmarkError(
                        f"rows with the same prompt have different tokens: {streams[-1]}"
                    )
        if not all(agree(a, b) for a, b in zip(*streams, strict=True)):
            raise BenchmarkError(f"depth 1 and depth 2 produce different tokens: {streams}")
        return {
            "rows": len(prompts),
            "tokens": len(streams[0][0]),
            "distinct_tokens": len({t for row in streams[0] for t in row}),
        }

    def memory(self, batch: int) -> dict[str, Any]:
        """What one slot and two slots hold with the engine's default chunk, and how long their
        capture takes.
        """
        held: dict[int, Memory] = {}
        captures: dict[str, Any] = {}
        for depth in (1, 2):
            prompts = [[0]] * batch
            with Session(
                self.config,
                self.weights,
                prompts,
                8,
                depth=depth,
                chunk=ENGINE_CHUNK,
                fast=self.fast,
            ) as session:
                held[depth] = session.memory
                report = session.runtime.report
                assert report is not None
                captures[f"depth {depth}"] = {
                    "graphs": report.graphs,
                    "nodes": report.nodes,
                    "seconds": report.seconds,
                }
        return {
            "chunk": ENGINE_CHUNK,
            "activation_bytes": {
                f"depth {depth}": memory.activations for depth, memory in held.items()
            },
            "activation_ratio": held[2].activations / held[1].activations,
            "graph_bytes": {f"depth {depth}": memory.graphs for depth, memory in held.items()},
            "capture": captures,
        }

    def measure(self, batch: int, depth: int) -> dict[str, Any]:
        """All figures of one batch size at one depth."""
        prompts = random_prompts(self.config.vocab, batch, self.prompt_len)
        measured = self._plain(prompts, depth)
        gap, step = self._gaps(prompts, depth)
        active = None if gap is None else 1 - gap["mean"] * 1e-3 / step["mean"]
        return {
            **measured,
            "step_gap_us": gap,
            "ms_per_step_with_events": step,
            "active_share": active,
        }

    def nodes(self, batch: int) -> dict[str, Any]:
        """Idle time inside one replay, from kernel records, at depth 2.

        The profiler may slow what runs after it: last of all.
        """
        prompts = random_prompts(self.config.vocab, batch, self.prompt_len)
        with Session(
            self.config,
            self.weights,
            prompts,
            self.warm_up + TRACED_STEPS + 16,
            depth=2,
            fast=self.fast,
        ) as session:
            session.prefill()
            session.run(self.warm_up)
            found = idle(record(lambda: session.run(TRACED_STEPS)))
        if not found:
            raise BenchmarkError("the profile holds no kernel records of at least two steps")
        return found

    def timeline_cost(self, batch: int) -> dict[str, Any]:
        """Windows of steps at depth 2 with the checks for a timeline that nobody records over
        windows without, in turns; ms per step.
        """
        prompts = random_prompts(self.config.vocab, batch, self.prompt_len)
        new_tokens = self.warm_up + 2 * TIMELINE_ROUNDS * TIMELINE_STEPS + 16
        off: list[float] = []
        bare: list[float] = []
        with Session(
            self.config,
            self.weights,
            prompts,
            new_tokens,
            depth=2,
            blocking=self.blocking,
            fast=self.fast,
        ) as session:
            session.prefill()
            session.run(self.warm_up)
            for round_ in range(2 * TIMELINE_ROUNDS):
                is_bare = round_ % 4 in (1, 2)  # off, bare, bare, off: contexts grow meanwhile
                with bare_probe() if is_bare else nullcontext():
                    (bare if is_bare else off).append(fmean(session.run(TIMELINE_STEPS)))
            session.check()
        ratios = [one / other for one, other in zip(off, bare, strict=True)]
        return {
            "off_ms": median(off),
            "bare_ms": median(bare),
            "ratio": median(ratios),
            "ratios": ratios,
            "steps": TIMELINE_STEPS,
        }

    def _plain(self, prompts: list[list[int]], depth: int) -> dict[str, Any]:
        batch, host_steps = len(prompts), max(8, self.steps // 4)
        self._reset_peak()
        new_tokens = self.warm_up + self.steps + host_steps + 16
        with Session(
            self.config,
            self.weights,
            prompts,
            new_tokens,
            depth=depth,
            blocking=self.blocking,
            fast=self.fast,
        ) as session:
            session.prefill()
            first_steps = session.run(self.warm_up)
            quiet, begin = session.pipeline.stats.quiet_steps, session.context
            times = session.run(self.steps, self.seconds)
            quiet, context = (
                session.pipeline.stats.quiet_steps - quiet,
                (begin + session.context) / 2,
            )
            host = host_split(session, host_steps)
            session.check()
            report = session.runtime.report
            measured: dict[str, Any] = {
                "context": context,
                "steps": len(times),
                "prompt_tokens": self.prompt_len,
                "ms_per_step": summary(times),
                "first_steps_ms": first_steps[:4],
                "quiet_steps": quiet,
                "rows_equal": session.rows_equal(),
                "depths_equal": self._depths_equal(session),
                "host_us": host,
                "graphs": None if report is None else report.graphs,
                "graph_nodes": None if report is None else report.nodes,
                "kv_bytes": session.decoder.kv_bytes,
                "peak_bytes": self._peak(),
            }
        return measured | self._against_floor(
            batch, context, measured["ms_per_step"], measured["graph_nodes"]
        )

    def _against_floor(
        self, batch: int, context: float, step: dict[str, float], nodes: int | None
    ) -> dict[str, Any]:
        """Beside the read floor, and the step as `predict_step` has it from the floor and the
        nodes of its graph, on CUDA.
        """
        shape = StepShape.of(self.config, self.weights)
        node_us = NODE_US["programmatic launch" if self.fast else "plain graph"]
        predicted = predict_step(
            shape, Machine(self.bytes_per_s, node_us), batch, context, nodes or 0
        )
        floor = predicted.floor_ms
        return {
            "tokens_per_s": batch / step["mean"] * 1e3,
            "bytes_per_step": {
                "weights": shape.weight_bytes,
                "kv": round(batch * context * shape.kv_bytes_per_token),
            },
            "floor_ms": floor,
            "floor_share": floor / step["median"],
            "predicted_ms": predicted.total_ms if nodes and self.on_cuda else None,
            "us_per_node": (step["median"] - floor) * 1e3 / nodes if nodes else None,
        }

    def _gaps(
        self, prompts: list[list[int]], depth: int
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Step gaps between timing events, and ms/step while they are recorded."""
        new_tokens = self.warm_up + self.steps + 16
        options: dict[str, Any] = {"timing": True, "blocking": self.blocking, "fast": self.fast}
        with Session(
            self.config, self.weights, prompts, new_tokens, depth=depth, **options
        ) as session:
            session.prefill()
            session.run(self.warm_up)
            session.pipeline.stats.gaps_us.clear()
            times = session.run(self.steps, self.seconds)
            gaps = list(session.pipeline.stats.gaps_us)
            session.check()
        step = summary(times)
        assert step is not None
        return summary(gaps), step

    def _depths_equal(self, session: Session) -> bool:
        """Whether the tokens are those of the depth measured before; prefill through torch may
        differ in a last bit, `check` is strict.
        """
        tokens = [session.tokens[row.index] for row in session.rows]
        known = self._tokens.setdefault(session.batch, tokens)
        return all(agree(a, b) for a, b in zip(known, tokens, strict=True))

    def _reset_peak(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> int:
        """Bytes: torch's peak since the last reset on CUDA, the process's peak on a CPU."""
        if self.on_cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table_row(entry: dict[str, Any]) -> list[object]:
    """One line of the printed table."""
    host = entry["host_us"]
    gap = entry["step_gap_us"] or {}
    return [
        entry["model"],
        entry["batch"],
        entry["depth"],
        round(entry["context"]),
        entry["ms_per_step"]["median"],
        entry["predicted_ms"],
        entry["tokens_per_s"],
        entry["floor_ms"],
        f"{entry['floor_share']:.0%}",
        entry["us_per_node"],
        gap.get("median"),
        gap.get("p99"),
        host.get("plan"),
        host.get("launch"),
        host.get("commit"),
        host.get("deliver"),
        host.get("wait"),
        f"{entry['quiet_steps']}/{entry['steps']}",
    ]


def run_model(name: str, args: Namespace, result: ResultFile, bytes_per_s: float) -> Bench | None:
    """Adds the entries of one model: check, memory, then every batch and depth.

    None if it could not be loaded or is wrong.
    """
    benches: list[Bench] = []

    def load() -> dict[str, Any]:
        bench = Bench(name, args, bytes_per_s)
        benches.append(bench)
        return {"dtype": bench.dtype, "weight_bytes": bench.weights.nbytes, "check": bench.check()}

    if result.measure({"what": "check", "model": name}, load) is None:
        return None
    bench = benches[0]
    if not args.skip_memory:
        memory = result.measure(
            {"what": "memory", "model": name, "batch": max(args.batches)},
            partial(bench.memory, max(args.batches)),
        )
        if memory is not None:
            held = ", ".join(
                f"{depth} {size / 2**20:.1f} MiB"
                for depth, size in memory["activation_bytes"].items()
            )
            print(
                f"{name}: activations {held}, ratio {memory['activation_ratio']:.3f}; capture "
                f"{memory['capture']}",
                flush=True,
            )
    rows = []
    for batch in args.batches:
        for depth in args.depth:
            labels = {
                "what": "decode",
                "model": name,
                "dtype": bench.dtype,
                "batch": batch,
                "depth": depth,
                "kernels": args.kernels,
            }
            entry = result.measure(labels, partial(bench.measure, batch, depth))
            if entry is not None:
                rows.append(table_row(entry))
    if rows:
        print_table(HEADER, rows)
    for batch in args.batches if args.timeline_cost else ():
        cost = result.measure(
            {"what": "timeline", "model": name, "batch": batch}, partial(bench.timeline_cost, batch)
        )
        if cost is not None:
            print(
                f"{name}, B={batch}: {cost['off_ms']:.4g} ms with a timeline's checks, "
                f"{cost['bare_ms']:.4g} without, x{cost['ratio']:.4f}"
            )
    return bench


def trace_nodes(benches: list[Bench], args: Namespace, result: ResultFile) -> None:
    """Adds the node gaps of all models."""
    rows = []
    for bench in benches:
        for batch in args.batches:
            entry = result.measure(
                {"what": "nodes", "model": bench.name, "batch": batch}, partial(bench.nodes, batch)
            )
            if entry is not None:
                rows.append(
                    [
                        bench.name,
                        batch,
                        entry["step_us"],
                        entry["kernel_us"],
                        entry["node_gap_us"],
                        entry["kernels"],
                    ]
                )
    if rows:
        print_table(("model", "B", "traced step us", "in kernels", "node gap us", "kernels"), rows)


def arguments(given: list[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    models_option(options)
    options.add_argument("--batches", type=integers, default=[1, 8, 32])
    options.add_argument(
        "--context",
        type=positive_integer,
        default=512,
        help="tokens attended to in the middle of the measured window",
    )
    options.add_argument("--depth", type=integers, default=[1, 2])
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bfloat16 for shapes, the loader's choice for models",
    )
    options.add_argument(
        "--steps", type=positive_integer, default=200, help="steps per window at most"
    )
    options.add_argument(
        "--warm-up", type=positive_integer, default=16, help="steps before the first window"
    )
    options.add_argument(
        "--seconds",
        type=positive_number,
        default=4.0,
        help="a window ends after this time (but not before 8 steps)",
    )
    options.add_argument(
        "--floor-gib",
        type=positive_number,
        help="GiB that the floor sweep reads; default 9 on CUDA, 1 on a CPU",
    )
    backend_option(options)
    options.add_argument(
        "--spin", action="store_true", help="wait for steps by spinning instead of yielding the CPU"
    )
    options.add_argument(
        "--skip-memory", action="store_true", help="do not compare the memory of one slot and two"
    )
    options.add_argument(
        "--timeline-cost",
        action="store_true",
        help="compare steps with the checks for a timeline and without",
    )
    options.add_argument(
        "--no-nodes", dest="nodes", action="store_false", help="skip the profile for the node gap"
    )
    return options.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    args.kernels = running_kernels(args)
    result = ResultFile("decode", args, args.json)
    floor = result.measure(
        {"what": "floor"}, lambda: read_floor(device_of(args.device), bytes_of(args.floor_gib))
    )
    if floor is None:
        return 1
    print(f"read floor {floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']})", flush=True)
    traced: list[Bench] = []
    for name in args.model:
        bench = run_model(name, args, result, floor["bytes_per_s"])
        if bench is not None and bench.on_cuda and args.nodes:
            traced.append(bench)
    trace_nodes(traced, args, result)
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
