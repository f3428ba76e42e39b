"""Every op of a decode step at a model's shapes: µs, share of the read ceiling, ratio to torch.

    python -m benchmarks.kernels --models qwen3-0.6b --batches 1,8,32 --json FILE

Operands that a step would read from memory are rotated among so many copies that no cache holds
them; on CUDA all copies are run in one graph, and a time is the median of its replays over the
number of copies. Each result is checked against photon_ext/reference.py before it is timed. `loss`
is the time above bytes / ceiling. The case "layers" is a chain: the linears of a model's layers one
after the other. There, and with `--pdl` everywhere, a Hopper kernel starts while the one before
ends, as in a step; else it starts after that. Linears of weights of fewer bits (`--formats`) are
those of a decode step, and their bytes those of the format; Hopper kernels read a GGUF file's
blocks as they are regrouped for them. What memory has no room for is skipped.
`benchmarks.report FILE` shows a result's tables.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import options as cli
from benchmarks.common.models import SHAPES
from benchmarks.common.replay import Patience, Rotation, Run, cache_bytes, time_runs
from benchmarks.common.result import ResultFile
from benchmarks.common.result_tables import tables_of
from benchmarks.floor import bytes_of, read_floor
from benchmarks.kernel_cases.adapters import adapter_groups
from benchmarks.kernel_cases.attention import chunk_groups, decode_groups
from benchmarks.kernel_cases.case import BOUNDS, Case, Plan, Setting
from benchmarks.kernel_cases.chains import chain_groups
from benchmarks.kernel_cases.linears import linear_groups, stored_groups
from benchmarks.kernel_cases.pointwise import pointwise_groups
from benchmarks.kernel_cases.spatial import spatial_groups
from photon_ext.cli.info import describe
from photon_ext.engine.memory import available_bytes
from photon_ext.weight_format import WeightFormat

ON_GPU = {
    "models": ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama-3.2-1b"],
    "batches": [1, 4, 8, 16, 32, 64],
    "contexts": [16, 512, 4096, 32768],
    "chunks": [256, 2048],
}
FORMATS = [form.value for form in WeightFormat if form is not WeightFormat.DENSE]
ON_CPU = {"models": ["small"], "batches": [1], "contexts": [512], "chunks": [64]}
MOST_COPIES, QUICK_COPIES = 4096, 8
PATIENCE, QUICK_PATIENCE = Patience(20, 0.5), Patience(5, 0.1)
SPARE_MEMORY = 1.3  # of what a plan says that it allocates


class Bench:
    """Measures plans on one device against the ceiling of the same run."""

    def __init__(self, setting: Setting, patience: Patience, bytes_per_s: float) -> None:
        self.setting, self.patience, self.bytes_per_s = setting, patience, bytes_per_s
        self._baselines: dict[tuple[object, ...], dict[str, Any]] = {}

    def add(self, model: str, plan: Plan, result: ResultFile) -> dict[str, Any] | None:
        """One entry: measured, skipped or failed."""
        op = plan.ops[0] if len(plan.ops) == 1 else "chain"
        labels = {"model": model, "op": op, "what": plan.what, "way": plan.setting.way}
        labels |= plan.labels
        needed = plan.memory * SPARE_MEMORY
        # a lost device does not say either
        if not result.lost and needed > (free := available_bytes(self.setting.device)):
            told = f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
            result.absent(labels, "skipped", told)
            return None
        return result.measure(labels, partial(self._measure, model, plan))

    def _measure(self, model: str, plan: Plan) -> dict[str, Any]:
        case = plan.make(plan.setting)
        error = case.verify()
        measured = self._figures(case)
        measured["checked"] = {"error": error, "bound": BOUNDS[self.setting.dtype]}
        baseline = self._baseline((model, plan.ops, plan.what, *plan.labels.values()), case)
        if baseline is not None:
            measured["baseline"] = baseline
            measured["ratio"] = None if baseline["us"] is None else baseline["us"] / measured["us"]
        return measured

    def _figures(self, case: Case) -> dict[str, Any]:
        timing = time_runs(case.runs, self.setting.device, self.patience)
        ideal = case.nbytes / self.bytes_per_s * 1e6
        return {
            **timing._asdict(),
            "copies": len(case.runs),
            "cold": case.cold,
            "bytes": case.nbytes,
            "tb_per_s": case.nbytes / timing.us * 1e-6,
            "share": ideal / timing.us,
            "loss_us": timing.us - ideal,
            "dependencies": case.dependencies,
            "loss_us_per_dependency": (timing.us - ideal) / case.dependencies,
            "tflop_per_s": case.flops / timing.us * 1e-6 if case.flops else None,
        }

    def _baseline(self, key: tuple[object, ...], case: Case) -> dict[str, Any] | None:
        """torch's time for the same, measured once for all ways of an op; an error of torch's is
        noted, and is not the op's."""
        if key not in self._baselines and case.baseline is not None:
            try:
                name, runs = case.baseline()
                self._baselines[key] = {"name": name, "us": self._torch_us(runs)}
            except (RuntimeError, TypeError, NotImplementedError) as error:
                told = f"{type(error).__name__}: {error}".splitlines()[0]
                self._baselines[key] = {"name": None, "us": None, "error": told}
        return self._baselines.get(key)

    def _torch_us(self, runs: Sequence[Run]) -> float:
        with torch.inference_mode():
            return time_runs(runs, self.setting.device, self.patience).us


def groups(setting: Setting, args: Namespace) -> Iterator[list[Plan]]:
    """All plans of a model; those of one group share operands, which are freed before the next
    group's are made."""
    contexts = [each for each in args.contexts if each <= setting.config.longest]
    yield from chain_groups(setting, args.batches)
    yield from linear_groups(setting, args.batches)
    yield from stored_groups(setting, args.batches, args.formats)
    yield from adapter_groups(setting, args.batches)
    yield from spatial_groups(setting, args.batches)
    yield from decode_groups(setting, args.batches, contexts)
    yield from chunk_groups(setting, args.chunks, contexts)
    yield from pointwise_groups(setting, args.batches)


def wanted(plan: Plan, chosen: list[str] | None) -> bool:
    """Whether --ops cli.names the plan: by an op, by its use ("qkv"), or not at all."""
    return chosen is None or plan.what in chosen or any(op in chosen for op in plan.ops)


def run_model(
    name: str, bench: Bench, args: Namespace, result: ResultFile, known: set[str]
) -> None:
    """Adds all entries of one model. `known` gets what --ops may name."""
    for group in groups(bench.setting._replace(config=SHAPES[name]), args):
        for plan in group:
            known.update((plan.what, *plan.ops))
            if wanted(plan, args.ops):
                bench.add(name, plan, result)


def arguments(given: list[str] | None) -> Namespace:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--models", type=cli.names, help=f"of {', '.join(SHAPES)}")
    add("--batches", type=cli.integers)
    add("--ops", type=cli.names, help="only these: ops, or uses like qkv, attention, layers")
    add("--contexts", type=cli.integers, help="tokens that attention sees")
    add("--chunks", type=cli.integers, help="tokens of a prompt's chunk")
    told = f"of {', '.join(FORMATS)}: linears whose weights have fewer bits"
    add("--formats", type=cli.names, default=["fp8", "int4"], help=told)
    add("--dtype", choices=cli.DTYPES, default="bfloat16")
    told = "Hopper kernels start while the ones before end, as in a step"
    add("--pdl", action="store_true", help=told)
    add("--quick", action="store_true", help="few copies and replays: whether it runs at all")
    cli.floor_option(options)
    args = cli.fit_to_device(options.parse_args(given), ON_GPU, ON_CPU)
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        options.error(f"--models {', '.join(unknown)}: unknown; known are {', '.join(SHAPES)}")
    if unknown := [name for name in args.formats if name not in FORMATS]:
        options.error(f"--formats {', '.join(unknown)}: unknown; known are {', '.join(FORMATS)}")
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    device = cli.device_of(args.device)
    result = ResultFile("kernels", args, args.json)
    result.set(info=describe().splitlines())
    floor = result.measure({"what": "floor"}, lambda: read_floor(device, bytes_of(args.floor_gib)))
    if floor is None:
        return 1
    rotation = Rotation(cache_bytes(device), QUICK_COPIES if args.quick else MOST_COPIES)
    dtype = cli.DTYPES[args.dtype]
    setting = Setting(SHAPES[args.models[0]], device, dtype, rotation, pdl=args.pdl)
    quick = args.quick or device.type == "cpu"
    bench = Bench(setting, QUICK_PATIENCE if quick else PATIENCE, floor["bytes_per_s"])
    ceiling = f"read ceiling {floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']})"
    print(f"{ceiling}, cache {rotation.cache_bytes / 2**20:.0f} MiB", flush=True)
    known: set[str] = set()
    for name in args.models:
        run_model(name, bench, args, result, known)
    for table in tables_of(result.data):
        table.show()
    reasons = [e["reason"] for e in result.entries if e["status"] == "skipped"]
    for reason in dict.fromkeys(reasons):
        print(f"{reasons.count(reason)} entries not measured: {reason}")
    unknown = sorted(set(args.ops or ()) - known)
    if unknown:
        told = f"unknown; known are {', '.join(sorted(known))}"
        print(f"--ops {', '.join(unknown)}: {told}", file=sys.stderr)
    return 1 if result.failed or unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())
