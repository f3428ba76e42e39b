"""Every op of a decode step at a model's shapes: µs, TB/s, share of the read ceiling of the same
run, and the ratio to torch.

    python -m benchmarks.kernels --models qwen3-0.6b --batches 1,8,32 --json FILE [--markdown FILE]

Operands that a step would read from memory are rotated among so many copies that no cache holds
them; on CUDA all copies are run in one graph, and a time is the median of its replays over the
number of copies. Each result is checked against photon_ext/reference.py before it is timed. `loss`
is the time above bytes / ceiling. Two cases are chains: "layers" runs the linears of a model's
layers one after the other, "dependency" tiny ones whose whole time is the wait for each other. What
this build does not have is listed as missing.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from benchmarks.common.options import (
    DTYPES,
    device_of,
    integers,
    names,
    output_file,
    parser,
    positive_number,
)
from benchmarks.common.replay import Patience, Rotation, Run, cache_bytes, time_runs
from benchmarks.common.result import ResultFile, write_text
from benchmarks.common.shapes import SHAPES
from benchmarks.common.table import cell_text, markdown_table, print_table
from benchmarks.floor import bytes_of, read_floor
from benchmarks.kernel_cases.attention import chunk_groups, decode_groups
from benchmarks.kernel_cases.case import BOUNDS, Case, Plan, Setting
from benchmarks.kernel_cases.chains import chain_groups
from benchmarks.kernel_cases.linears import linear_groups
from benchmarks.kernel_cases.pointwise import pointwise_groups
from photon_ext.cli.info import describe
from photon_ext.models.config import ModelConfig
from photon_ext.models.shapes import NAMED_SHAPES

HEADER = (
    "op",
    "what",
    "way",
    "B",
    "context",
    "chunk",
    "us",
    "TB/s",
    "share",
    "loss us",
    "loss/dep",
    "TFLOP/s",
    "torch us",
    "ratio",
    "error",
)
MOST_COPIES, QUICK_COPIES = 4096, 8
PATIENCE, QUICK_PATIENCE = Patience(20, 0.5), Patience(5, 0.1)
SPARE_MEMORY = 1.3  # of what a plan says that it allocates


class Bench:
    """Measures plans on one device against the ceiling of the same run."""

    def __init__(self, setting: Setting, patience: Patience, bytes_per_s: float) -> None:
        self.setting, self.patience, self.bytes_per_s = setting, patience, bytes_per_s
        self._baselines: dict[tuple[object, ...], dict[str, Any]] = {}

    def add(self, model: str, plan: Plan, result: ResultFile) -> dict[str, Any] | None:
        """One entry: measured, missing, skipped or failed."""
        labels = {
            "model": model,
            "op": plan.ops[0] if len(plan.ops) == 1 else "chain",
            "what": plan.what,
            "way": plan.way,
            **plan.labels,
        }
        missing = plan.missing()
        if missing is not None:
            result.absent(labels, "missing", missing)
            return None
        needed = plan.memory * SPARE_MEMORY
        # a lost device does not say either
        if not result.lost and needed > (free := free_bytes(self.setting.device)):
            result.absent(
                labels,
                "skipped",
                f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free",
            )
            return None
        return result.measure(labels, partial(self._measure, model, plan))

    def _measure(self, model: str, plan: Plan) -> dict[str, Any]:
        case = plan.make()
        error = case.verify()
        measured = self._figures(case)
        measured["checked"] = {"error": error, "bound": BOUNDS[self.setting.dtype]}
        key = (
            (model, *plan.baseline_key)
            if case.baseline is not None
            else (model, plan.what, *plan.labels.values())
        )
        if plan.way == "torch":
            self._baselines[key] = {"name": "torch", "us": measured["us"]}
        baseline = self._baseline(key, case)
        if baseline is not None and plan.way != "torch":
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
        noted, and is not the op's.
        """
        if key not in self._baselines and case.baseline is not None:
            try:
                name, runs = case.baseline()
                self._baselines[key] = {"name": name, "us": self._torch_us(runs)}
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self._baselines[key] = {
                    "name": None,
                    "us": None,
                    "error": f"{type(error).__name__}: {error}".splitlines()[0],
                }
        return self._baselines.get(key)

    def _torch_us(self, runs: Sequence[Run]) -> float:
        with torch.inference_mode():
            return time_runs(runs, self.setting.device, self.patience).us


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def groups(config: ModelConfig, setting: Setting, args: Namespace) -> Iterator[list[Plan]]:
    """All plans of a model; those of one group share operands, which are freed before the next
    group's are made.
    """
    contexts = [context for context in args.contexts if context <= config.max_positions]
    yield from chain(
        chain_groups(config, setting, args.batches),
        linear_groups(config, setting, args.batches),
        decode_groups(config, setting, args.batches, contexts),
        chunk_groups(config, setting, args.chunks, contexts),
        pointwise_groups(config, setting, args.batches),
    )


def wanted(plan: Plan, chosen: list[str] | None) -> bool:
    """Whether --ops names the plan: by an op, by its use ("qkv"), or not at all."""
    return chosen is None or plan.what in chosen or any(op in chosen for op in plan.ops)


def run_model(
    name: str, bench: Bench, args: Namespace, result: ResultFile, known: set[str]
) -> list[dict[str, Any]]:
    """Adds all entries of one model; returns the measured ones.

    `known` gets what --ops may name.
    """
    entries = []
    for group in groups(SHAPES[name], bench.setting, args):
        for plan in group:
            known.update((plan.what, *plan.ops))
            if wanted(plan, args.ops):
                entry = bench.add(name, plan, result)
                entries += [] if entry is None else [entry]
    return entries


def table_row(entry: dict[str, Any]) -> list[object]:
    """One line of the printed table."""
    baseline = entry.get("baseline") or {}
    return [
        entry["op"],
        entry["what"],
        entry["way"],
        entry["batch"],
        entry.get("context"),
        entry.get("chunk"),
        entry["us"],
        entry["tb_per_s"],
        f"{entry['share']:.0%}" + ("" if entry["cold"] else " cached"),
        entry["loss_us"],
        entry["loss_us_per_dependency"],
        entry["tflop_per_s"],
        baseline.get("us"),
        entry.get("ratio"),
        entry["checked"]["error"],
    ]


def markdown(entries: list[dict[str, Any]]) -> str:
    """A line per op and way, a column per batch: µs, share of the ceiling, and how many times as
    fast as torch.
    """
    batches = sorted({entry["batch"] for entry in entries})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for entry in entries:
        sizes = " ".join(
            f"{label} {entry[label]}" for label in ("context", "chunk") if label in entry
        )
        line = lines.setdefault((entry["op"], entry["what"], entry["way"], sizes), {})
        ratio = f", ×{entry['ratio']:.2f}" if entry.get("ratio") is not None else ""
        line[entry["batch"]] = f"{cell_text(entry['us'])} µs, {entry['share']:.0%}{ratio}"
    header = ["op", "what", "way", "", *(f"B={batch}" for batch in batches)]
    return markdown_table(
        header, [[*key, *(cells.get(batch) for batch in batches)] for key, cells in lines.items()]
    )


def arguments(given: list[str] | None) -> Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--models", type=names, default=list(NAMED_SHAPES), help=f"of {', '.join(SHAPES)}"
    )
    options.add_argument("--batches", type=integers, default=[1, 4, 8, 16, 32, 64])
    options.add_argument(
        "--ops", type=names, help="only these: ops, or uses like qkv, attention, layers, dependency"
    )
    options.add_argument(
        "--contexts",
        type=integers,
        default=[16, 512, 4096, 32768],
        help="tokens that attention sees",
    )
    options.add_argument(
        "--chunks", type=integers, default=[256, 2048], help="lines of a prompt's chunk"
    )
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options.add_argument(
        "--quick",
        action="store_true",
        help="few copies and replays: whether it runs, not how fast; caches may serve",
    )
    options.add_argument(
        "--floor-gib",
        type=positive_number,
        help="GiB that the floor sweep reads; default 9 on CUDA, 1 on a CPU",
    )
    options.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the tables here as Markdown"
    )
    args = options.parse_args(given)
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        options.error(f"--models {', '.join(unknown)}: unknown; known are {', '.join(SHAPES)}")
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    device = device_of(args.device)
    result = ResultFile("kernels", args, args.json)
    result.set(info=describe().splitlines())
    floor = result.measure({"what": "floor"}, lambda: read_floor(device, bytes_of(args.floor_gib)))
    if floor is None:
        return 1
    rotation = Rotation(cache_bytes(device), QUICK_COPIES if args.quick else MOST_COPIES)
    setting = Setting(device, DTYPES[args.dtype], rotation)
    bench = Bench(setting, QUICK_PATIENCE if args.quick else PATIENCE, floor["bytes_per_s"])
    print(
        f"read ceiling {floor['bytes_per_s'] / 1e9:.1f} GB/s ({floor['method']}), cache "
        f"{rotation.cache_bytes / 2**20:.0f} MiB",
        flush=True,
    )
    texts, known = [], set[str]()
    for name in args.models:
        entries = run_model(name, bench, args, result, known)
        print(f"\n{name}, {args.dtype}", flush=True)
        if entries:
            print_table(HEADER, [table_row(entry) for entry in entries])
            texts.append(f"{name}, {args.dtype}:\n\n{markdown(entries)}")
    if args.markdown is not None:
        write_text(args.markdown, "\n".join(texts))
    absent = [entry for entry in result.entries if entry["status"] in ("missing", "skipped")]
    for reason in dict.fromkeys(entry["reason"] for entry in absent):
        print(
            f"{sum(entry['reason'] == reason for entry in absent)} entries not measured: {reason}"
        )
    unknown = sorted(set(args.ops or ()) - known)
    if unknown:
        print(
            f"--ops {', '.join(unknown)}: unknown; known are {', '.join(sorted(known))}",
            file=sys.stderr,
        )
    return 1 if result.failed or unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())
