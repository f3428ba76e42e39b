"""Where the CTAs of a decode step's kernels spend their time: medians of stamps inside them.

    PHOTON_STAMPS=1 python setup.py build_ext --inplace
    python -m benchmarks.lab.stamps --model qwen3-0.6b --batches 1,8,32

Only such a build has the stamps (csrc/cuda/stamps.cuh), in the linears of up to 64 tokens and in
split attention. A line is a kernel: how many CTAs with work were seen, and for each stretch between
two points of theirs the median and the 95th percentile, in microseconds. `early` is how long a CTA
was there before the kernels in front had ended, filling its ring. A stamped step is a little slower
than one without: compare stretches, not steps.
"""

from __future__ import annotations

import ctypes
import struct
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common import options as cli
from benchmarks.common.models import open_model
from benchmarks.common.result import BenchmarkError, ResultFile
from photon_ext._library import OPS_FILE
from photon_ext.models.config import ModelConfig
from photon_ext.observe.meter import percentile

RECORD = struct.Struct("<6iQ5Q")  # StampRecord
MOST_RECORDS = 1 << 17
SOURCES = ("linears", "attention")
KERNELS = ("norm_linear", "norm_swiglu", "linear_residual", "attention")
STRETCHES = ("early", "load", "sum", "store")
"""Between the points: start, wait over, first activations there, sums complete, results written."""


class Stamp(NamedTuple):
    """A CTA. `clocks`: of its SM, by point; 0: it did not come there."""

    kernel: str
    rows: int
    columns: int
    cta: int
    sm: int
    ns: int
    clocks: tuple[int, ...]

    @property
    def has_work(self) -> bool:
        return all(self.clocks)

    @classmethod
    def of(cls, words: tuple[int, ...]) -> Stamp:
        kernel, rows, columns, cta, sm, _, ns, *clocks = words
        return cls(KERNELS[kernel], rows, columns, cta, sm, ns, tuple(clocks))


def takers(file: str) -> list[Callable[[Any, int], int]]:
    """The functions of a library that give its stamps away; BenchmarkError: it has none."""
    library, found = ctypes.CDLL(file), []
    for name in SOURCES:
        take = getattr(library, f"photon_ext_{name}_stamps", None)
        if take is None:
            told = "build it with PHOTON_STAMPS=1 python setup.py build_ext --inplace"
            raise BenchmarkError(f"{file} has no stamps: {told}")
        take.argtypes, take.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        found.append(take)
    return found


def take_stamps(file: str) -> list[Stamp]:
    """All stamps since the last call, in no order."""
    stamps: list[Stamp] = []
    for take in takers(file):
        room = ctypes.create_string_buffer(MOST_RECORDS * RECORD.size)
        count = take(room, MOST_RECORDS)
        if count < 0:
            raise BenchmarkError("a CUDA call failed while stamps were taken")
        stamps += map(Stamp.of, RECORD.iter_unpack(room.raw[: count * RECORD.size]))
    return stamps


def clocks_per_us(stamps: Iterable[Stamp]) -> float:
    """By the two stamps of one SM that are farthest apart."""
    of_sm: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for stamp in stamps:
        of_sm[stamp.sm].append((stamp.ns, stamp.clocks[0]))
    spans = [(min(pairs), max(pairs)) for pairs in of_sm.values()]
    first, last = max(spans, key=lambda span: span[1][0] - span[0][0])
    if last[0] == first[0]:
        raise BenchmarkError("there are too few stamps to tell the clock by")
    return (last[1] - first[1]) / (last[0] - first[0]) * 1e3


def use_of(stamp: Stamp, config: ModelConfig) -> str:
    """What a model uses the kernel for."""
    if stamp.kernel == "norm_linear":
        return "head" if stamp.rows == config.vocab else "qkv"
    if stamp.kernel == "linear_residual":
        return "o" if stamp.columns == config.q_size else "down"
    return "gate_up" if stamp.kernel == "norm_swiglu" else "attention"


def summary(stamps: list[Stamp], config: ModelConfig) -> list[dict[str, Any]]:
    """A line for each use of a kernel, in the order of a layer."""
    clocks = clocks_per_us(stamps)
    by_use: dict[str, list[Stamp]] = defaultdict(list)
    for stamp in stamps:
        by_use[use_of(stamp, config)].append(stamp)
    return [
        {"use": use, "ctas": sum(each.has_work for each in by_use[use])}
        | stretches([each for each in by_use[use] if each.has_work], clocks)
        for use in ("qkv", "attention", "o", "gate_up", "down", "head")
        if use in by_use
    ]


def stretches(stamps: list[Stamp], clocks: float) -> dict[str, list[float]]:
    """Median and 95th percentile of each stretch, and of all behind the wait, in microseconds."""
    pairs = [*zip(STRETCHES, range(4), range(1, 5), strict=True), ("late", 1, 4)]
    found = {}
    for name, begin, end in pairs:
        us = [(stamp.clocks[end] - stamp.clocks[begin]) / clocks for stamp in stamps]
        found[name] = [round(median(us), 3), round(percentile(us, 0.95), 3)] if us else []
    return found


def measure(args: Namespace) -> list[dict[str, Any]]:
    from benchmarks.lab.step import LabStep

    takers(str(OPS_FILE))  # or there is nothing to measure
    config, weights = open_model(args.model, None, torch.device("cuda"))
    lines = []
    for batch in args.batches:
        step = LabStep(config, weights, batch, args.context)
        step.turn()
        take_stamps(str(OPS_FILE))
        step.reset()
        for _ in range(args.steps):
            step.run()
        labels = {"what": "stamps", "model": args.model, "batch": batch, "context": args.context}
        lines += [labels | line for line in summary(take_stamps(str(OPS_FILE)), config)]
    return lines


def text_of(line: dict[str, Any]) -> str:
    columns = (f"{name} {line[name][0]:6.2f} {line[name][1]:6.2f}" for name in (*STRETCHES, "late"))
    return f"{line['model']} B={line['batch']:<3} {line['use']:<10}" + "  ".join(columns)


def main(given: list[str] | None = None) -> int:
    options = cli.parser(__doc__.splitlines()[0])
    add = options.add_argument
    add("--model", default="qwen3-0.6b")
    add("--batches", type=cli.integers, default=[1, 8, 32])
    add("--context", type=cli.positive_integer, default=512)
    add("--steps", type=cli.positive_integer, default=4)
    args = options.parse_args(given)
    result = ResultFile("lab.stamps", args, args.json)
    for line in measure(args):
        print(text_of(line), flush=True)
        result.add(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
