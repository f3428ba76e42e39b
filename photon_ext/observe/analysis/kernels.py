"""What the kernels of steady steps say: their shares of time, and the figures of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import Gap, GapKind
from photon_ext.observe.analysis.steps import Steps, short_name


class KernelShare(NamedTuple):
    """One kernel in steady steps: share of all kernel time, mean microseconds, launches a step."""

    name: str
    share: float
    mean_us: float
    per_step: float


class StepFigures(NamedTuple):
    """Medians of steady steps, microseconds: first kernel to the next step's first, kernels
    running, idle, and idle as a share."""

    steps: int
    wall_us: float
    busy_us: float
    gap_us: float
    gap_share: float
    kernels: int


def kernel_shares(steps: Steps) -> list[KernelShare]:
    """By share of time, largest first."""
    steady = steps.steady
    times: dict[str, list[int]] = defaultdict(list)
    for step in steady:
        for kernel in steps.of(step):
            times[short_name(kernel.name)].append(kernel.end - kernel.start)
    total = sum(map(sum, times.values())) or 1
    made = [
        KernelShare(name, sum(ns) / total, fmean(ns) / 1e3, len(ns) / len(steady))
        for name, ns in times.items()
    ]
    return sorted(made, key=lambda share: -share.share)


def step_figures(steps: Steps, gaps: Iterable[Gap]) -> StepFigures | None:
    """Of steady steps, each with the gap that follows it; None without them."""
    starts = {step.number: step.start for step in steps.steps}
    idle: dict[int, int] = defaultdict(int)
    for gap in gaps:
        before = gap.kind in (GapKind.STEP, GapKind.REST)
        idle[gap.step - before] += gap.ns
    rows = [
        (starts[step.number + 1] - step.start, step.busy, idle[step.number], step.kernels)
        for step in steps.steady
        if step.number + 1 in starts
    ]
    if not rows:
        return None
    wall, busy, gap_ns, kernels = zip(*rows, strict=True)
    share = median(idle_ns / wall_ns for wall_ns, _, idle_ns, _ in rows if wall_ns)
    wall_us, busy_us, gap_us = (median(ns) / 1e3 for ns in (wall, busy, gap_ns))
    return StepFigures(len(rows), wall_us, busy_us, gap_us, share, kernels[0])
