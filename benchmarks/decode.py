"""Steady decode: ms/step against the read floor of the same run, step gap, node gap, host time.

    python -m benchmarks.decode --model qwen3-0.6b --batches 1,8,32 --depth 1,2 --json FILE

A model is a named shape with random weights, a model directory, a .gguf file or "smollm2". Every
figure comes from a window of its own, so that what is added to see one does not slow another:
plain steps for ms/step, the host's split, a second pipeline with timing events for the step gap,
and on CUDA, after everything else, a profile for the node gap. Beside it stands a prediction: the
floor, and NODE_US for each kernel of the step. `--quantize int4` rounds weights, "none" expands
them, `--kv-dtype fp8` stores keys and values in fp8, and the floor counts bytes as they then lie in
memory. `--timeline-cost` compares steps
with the checks for a timeline, while none is recorded, and without. On a CPU the sizes are small:
about a minute.

`--engine plain,exact` and `--prefill 256,2048` measure these alone: ms/step of whole answers
through the engine, and the forward of a prompt of so many tokens.
"""

from __future__ import annotations

import resource
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any, get_args
from unittest.mock import patch

import torch

from benchmarks.common import options as cli
from benchmarks.common.engine_steps import prefill_forward, through_engine
from benchmarks.common.kineto import idle, record
from benchmarks.common.models import open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.common.session import Session, agree, host_split, random_prompts, summary
from benchmarks.floor import bytes_of, read_floor
from photon_ext.checks import Activations, KvDtype
from photon_ext.models.layers.buffers import kv_bytes_per_token
from photon_ext.models.requantize import CHOICES
from photon_ext.runtime import probe

TRACED_STEPS = 12
CHECKED_STEPS = 16
SPARE = 16  # tokens beyond the windows: no row may end while it is measured
WAYS = ("plain", "exact")  # of the engine
PROBES = ("turn", "begin", "end", "launched", "committed")
TIMELINE_ROUNDS, TIMELINE_STEPS = {"cuda": 20, "cpu": 4}, 40
NODE_US = {"hopper": 2.5, "portable": 3.0}
"""Microseconds from one kernel to the next, by backend (hopper launches them programmatically): the
middle of what was measured at one token a step on an H200, 2.1 to 2.9; an estimate for plain
graphs."""
ON_GPU = {"model": ["qwen3-0.6b"], "batches": [1, 8, 32], "context": 512, "steps": 200}
ON_CPU = {"model": ["small"], "batches": [1, 4], "context": 128, "steps": 40}


class Bench:
    """One model on one device, and the tokens seen so far: they must not depend on depth."""

    def __init__(self, name: str, args: Namespace, bytes_per_s: float) -> None:
        dtype = None if args.dtype is None else cli.DTYPES[args.dtype]
        self.name, self.args = name, args
        self.config, self.weights = open_model(
            name, dtype, cli.device_of(args.device), args.quantize
        )
        self.prompt_len = max(1, args.context - args.warm_up - args.steps // 2)
        self.bytes_per_s = bytes_per_s
        self._tokens: dict[int, list[list[int]]] = {}

    @property
    def on_cuda(self) -> bool:
        return self.weights.device.type == "cuda"

    @property
    def _kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.config, self.weights.dtype, self.args.kv_dtype)

    @property
    def dtype(self) -> str:
        return str(self.weights.dtype).removeprefix("torch.")

    def check(self) -> dict[str, Any]:
        """Equal prompts give equal rows, and depths equal tokens; logits are finite."""
        prompts = random_prompts(self.config.vocab, 3, 24)
        streams = []
        for depth in (1, 2):
            with self._session(prompts, CHECKED_STEPS + 4, depth=depth, exact=True) as session:
                session.begin(CHECKED_STEPS - 2)
                session.check()
                streams.append([session.tokens[row.index] for row in session.rows])
                if not session.rows_equal():
                    told = f"rows with the same prompt have different tokens: {streams[-1]}"
                    raise BenchmarkError(told)
        if not all(agree(a, b) for a, b in zip(*streams, strict=True)):
            raise BenchmarkError(f"depth 1 and depth 2 produce different tokens: {streams}")
        distinct = len({token for row in streams[0] for token in row})
        return {"rows": 3, "tokens": len(streams[0][0]), "distinct_tokens": distinct}

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
        """Idle time inside one replay at depth 2, by kernel records. Comes last of all: the
        profiler may slow what runs after it."""
        prompts = random_prompts(self.config.vocab, batch, self.prompt_len)
        new_tokens = self.args.warm_up + TRACED_STEPS + SPARE
        with self._session(prompts, new_tokens, depth=2) as session:
            session.begin(self.args.warm_up)
            found = idle(record(lambda: session.run(TRACED_STEPS)))
        if not found:
            raise BenchmarkError("the profile holds no kernel records of at least two steps")
        return found

    def timeline_cost(self, batch: int) -> dict[str, Any]:
        """Windows of steps at depth 2 with the checks for a timeline that nobody records over
        windows without them, in turns; ms per step."""
        rounds, steps = TIMELINE_ROUNDS[self.weights.device.type], TIMELINE_STEPS
        prompts = random_prompts(self.config.vocab, batch, self.prompt_len)
        new_tokens = self.args.warm_up + 2 * rounds * steps + SPARE
        off: list[float] = []
        bare: list[float] = []
        without = dict.fromkeys(PROBES, lambda *given: None)
        with self._session(prompts, new_tokens, depth=2, blocking=not self.args.spin) as session:
            session.begin(self.args.warm_up)
            for round_ in range(2 * rounds):
                is_bare = round_ % 4 in (1, 2)  # off, bare, bare, off: contexts grow meanwhile
                with patch.multiple(probe, **without) if is_bare else nullcontext():
                    (bare if is_bare else off).append(fmean(session.run(steps)))
            session.check()
        ratios = [one / other for one, other in zip(off, bare, strict=True)]
        medians = {"off_ms": median(off), "bare_ms": median(bare), "ratio": median(ratios)}
        return {**medians, "ratios": ratios, "steps": steps}

    def through_engine(self, batch: int, way: str) -> dict[str, Any]:
        """Decode of whole requests, which the read floor of their mean context is beside."""
        exact, args = way == "exact", self.args
        found = through_engine(
            self.config, self.weights, batch, exact, args.kv_dtype, args.activations
        )
        nbytes = self.weights.bytes_per_step + batch * found["context"] * self._kv_bytes_per_token
        return {**found, "floor_ms": nbytes / self.bytes_per_s * 1e3}

    def prefill(self, chunk: int, way: str) -> dict[str, Any]:
        """The forward of a whole prompt."""
        backend = cli.backend_of(self.args)
        exact, activations = way == "exact", self.args.activations
        return prefill_forward(self.config, self.weights, chunk, backend, exact, activations)

    def _session(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Session:
        options |= {"backend": cli.backend_of(self.args), "kv_dtype": self.args.kv_dtype}
        if not options.get("exact"):  # as `check` has it
            options["activations"] = self.args.activations
        return Session(self.config, self.weights, prompts, new_tokens, **options)

    def _plain(self, prompts: list[list[int]], depth: int) -> dict[str, Any]:
        args, batch = self.args, len(prompts)
        host_steps = max(8, args.steps // 4)
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        new_tokens = args.warm_up + args.steps + host_steps + SPARE
        with self._session(prompts, new_tokens, depth=depth, blocking=not args.spin) as session:
            first_steps = session.begin(args.warm_up)
            quiet, begin = session.pipeline.stats.quiet_steps, session.context
            times = session.run(args.steps, args.seconds)
            quiet = session.pipeline.stats.quiet_steps - quiet
            context = (begin + session.context) / 2
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
        step, nodes = measured["ms_per_step"], measured["graph_nodes"]
        return measured | self._against_floor(batch, context, step, nodes)

    def _against_floor(
        self, batch: int, context: float, step: dict[str, float], nodes: int | None
    ) -> dict[str, Any]:
        """Beside the read floor, and on CUDA beside the prediction."""
        weights = self.weights.bytes_per_step
        kv = round(batch * context * self._kv_bytes_per_token)
        floor = (weights + kv) / self.bytes_per_s * 1e3
        node_us = NODE_US[cli.backend_of(self.args)]
        return {
            "tokens_per_s": batch / step["mean"] * 1e3,
            "bytes_per_step": {"weights": weights, "kv": kv},
            "floor_ms": floor,
            "floor_share": floor / step["median"],
            "predicted_ms": floor + nodes * node_us / 1e3 if nodes and self.on_cuda else None,
            "us_per_node": (step["median"] - floor) * 1e3 / nodes if nodes else None,
        }

    def _gaps(
        self, prompts: list[list[int]], depth: int
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Step gaps between timing events, and ms/step while they are recorded."""
        args = self.args
        options = {"timing": True, "blocking": not args.spin}
        new_tokens = args.warm_up + args.steps + SPARE
        with self._session(prompts, new_tokens, depth=depth, **options) as session:
            session.begin(args.warm_up)
            session.pipeline.stats.gaps_us.clear()
            times = session.run(args.steps, args.seconds)
            gaps = list(session.pipeline.stats.gaps_us)
            session.check()
        step = summary(times)
        assert step is not None
        return summary(gaps), step

    def _depths_equal(self, session: Session) -> bool:
        """Whether tokens are those of the depth before; `check` is strict, while prefill through
        torch may differ in a last bit."""
        tokens = [session.tokens[row.index] for row in session.rows]
        known = self._tokens.setdefault(session.batch, tokens)
        return all(agree(a, b) for a, b in zip(known, tokens, strict=True))

    def _peak(self) -> int:
        """Bytes: torch's peak since the last reset on CUDA, the process's peak on a CPU."""
        if self.on_cuda:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_model(name: str, args: Namespace, result: ResultFile, bytes_per_s: float) -> Bench | None:
    """Adds a model's entries: check, every batch and depth. None if it is wrong."""
    benches: list[Bench] = []

    def load() -> dict[str, Any]:
        bench = Bench(name, args, bytes_per_s)
        benches.append(bench)
        weight_bytes = bench.weights.nbytes
        stored = bench.config.quantization
        return {
            "dtype": bench.dtype,
            "weights": bench.dtype if stored is None else str(stored),
            "weight_bytes": weight_bytes,
            "check": bench.check(),
        }

    if result.measure({"what": "check", "model": name}, load) is None:
        return None
    bench = benches[0]
    if args.engine or args.prefill:
        for way, batch in product(args.engine, args.batches):
            labels = {"what": "engine", "model": name, "batch": batch, "way": way}
            result.measure(labels, partial(bench.through_engine, batch, way))
        for chunk, way in product(args.prefill, args.engine or ["plain"]):
            labels = {"what": "prefill", "model": name, "chunk": chunk, "way": way}
            result.measure(labels, partial(bench.prefill, chunk, way))
        return bench
    for batch in args.batches:
        for depth in args.depth:
            sizes = {"dtype": bench.dtype, "batch": batch, "depth": depth}
            labels = {"what": "decode", "model": name, **sizes, "kernels": args.kernels}
            result.measure(labels, partial(bench.measure, batch, depth))
    for batch in args.batches if args.timeline_cost else ():
        labels = {"what": "timeline", "model": name, "batch": batch}
        result.measure(labels, partial(bench.timeline_cost, batch))
    return bench


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    cli.models_option(options)
    number, add = cli.positive_integer, options.add_argument
    add("--batches", type=cli.integers)
    add("--context", type=number, help="tokens attended to in the middle of the window")
    add("--depth", type=cli.integers, default=[1, 2])
    add(
        "--dtype", choices=cli.DTYPES, help="default: bfloat16 for shapes, a model's own for models"
    )
    add(
        "--quantize", choices=CHOICES, help="how weights lie in memory; default: as load_model does"
    )
    add("--kv-dtype", choices=get_args(KvDtype), help="of keys and values; default: of the weights")
    told = "what linears of weights in fp8 read in steps of many tokens; default: the model's dtype"
    add("--activations", choices=get_args(Activations), help=told)
    add("--steps", type=number, help="steps per window at most")
    add("--warm-up", type=number, default=16, help="steps before the first window")
    add(
        "--seconds",
        type=cli.positive_number,
        default=4.0,
        help="a window ends after this time (but not before 8 steps)",
    )
    cli.floor_option(options)
    cli.backend_option(options)
    add("--spin", action="store_true", help="wait for steps by spinning")
    add("--timeline-cost", action="store_true", help="compare steps with a timeline's checks")
    told = f"of {', '.join(WAYS)}: measure only decode through the engine, so"
    add("--engine", type=cli.names, default=[], metavar="WAYS", help=told)
    told = "measure only forwards of prompts of so many tokens"
    add("--prefill", type=cli.integers, default=[], metavar="TOKENS", help=told)
    add("--no-nodes", dest="nodes", action="store_false", help="skip the profile for the node gap")
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    args.kernels = cli.running_kernels(args)
    if unknown := [way for way in args.engine if way not in WAYS]:
        options.error(f"--engine {', '.join(unknown)}: unknown; known are {', '.join(WAYS)}")
    if args.activations and "exact" in args.engine:
        options.error(f"--activations {args.activations}: not of --engine exact; leave out one")
    args.nodes = args.nodes and not (args.engine or args.prefill)
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    result = ResultFile("decode", args, args.json)
    device = cli.device_of(args.device)
    floor = result.measure({"what": "floor"}, lambda: read_floor(device, bytes_of(args.floor_gib)))
    if floor is None:
        return 1
    print(f"read floor {floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']})", flush=True)
    traced: list[Bench] = []
    for name in args.model:
        bench = run_model(name, args, result, floor["bytes_per_s"])
        if bench is not None and bench.on_cuda and args.nodes:
            traced.append(bench)
    for bench, batch in product(traced, args.batches):
        labels = {"what": "nodes", "model": bench.name, "batch": batch}
        result.measure(labels, partial(bench.nodes, batch))
    for table in tables_of(result.data):
        table.show()
    return 0 if all(entry["status"] == "ok" for entry in result.entries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
