"""What the kernels of steady steps say: shares of time, the distribution of gaps, gaps by
transition, allocations, bandwidth.

The tables are those of the pegainfer post "From Pre-allocation to Graph Replay".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import Gap, GapKind
from photon_ext.observe.analysis.steps import Steps, short_name
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.records import DeviceKind, Records

EDGES_US = (1, 5, 10, 50)
BINS = ("< 1", "1-5", "5-10", "10-50", "> 50")


class KernelShare(NamedTuple):
    """One kernel in steady steps: share of all kernel time, mean microseconds, launches per
    step.
    """

    name: str
    share: float
    mean_us: float
    per_step: float


class Bin(NamedTuple):
    """Gaps of one range of lengths, microseconds: count, share of all gaps, their sum per step."""

    label: str
    times: int
    share: float
    us_per_step: float


class Transition(NamedTuple):
    """Gaps between one kernel and the next: count, median and largest, and their sum per step,
    microseconds.
    """

    before: str
    after: str
    times: int
    median_us: float
    max_us: float
    us_per_step: float


class CallCost(NamedTuple):
    """One API function: calls, mean microseconds, calls per step of the window."""

    name: str
    calls: int
    mean_us: float
    per_step: float


class StepFigures(NamedTuple):
    """Medians of steady steps, microseconds: first kernel to the next step's first, kernels
    running, idle, and idle as a share.
    """

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
    total = sum(map(sum, times.values()))
    made = (
        [
            KernelShare(name, sum(ns) / total, fmean(ns) / 1e3, len(ns) / len(steady))
            for name, ns in times.items()
        ]
        if total
        else []
    )
    return sorted(made, key=lambda share: -share.share)


def step_figures(steps: Steps, gaps: Iterable[Gap]) -> StepFigures | None:
    """Of steady steps, each with the gap that follows it; None without them."""
    starts = {step.number: step.start for step in steps.steps}
    idle: dict[int, int] = defaultdict(int)
    for gap in gaps:
        idle[gap.step - 1 if gap.kind in (GapKind.STEP, GapKind.REST) else gap.step] += gap.ns
    rows = [
        (starts[step.number + 1] - step.start, step.busy, idle[step.number], step.kernels)
        for step in steps.steady
        if step.number + 1 in starts
    ]
    if not rows:
        return None
    wall, busy, gap_ns, _ = zip(*rows, strict=True)
    share = median(idle_ns / wall_ns for wall_ns, _, idle_ns, _ in rows if wall_ns)
    return StepFigures(
        len(rows), median(wall) / 1e3, median(busy) / 1e3, median(gap_ns) / 1e3, share, rows[0][3]
    )


def histogram(gaps: Iterable[Gap], steps: int) -> list[Bin]:
    """Gaps by length, over `steps` steps."""
    counts, sums = [0] * len(BINS), [0] * len(BINS)
    for gap in gaps:
        place = sum(gap.ns >= edge * 1000 for edge in EDGES_US)
        counts[place] += 1
        sums[place] += gap.ns
    total = sum(counts)
    return [
        Bin(label, count, count / total if total else 0.0, ns / 1e3 / max(steps, 1))
        for label, count, ns in zip(BINS, counts, sums, strict=True)
    ]


def transitions(gaps: Iterable[Gap], steps: int) -> list[Transition]:
    """Gaps by the kernels around them, costliest first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for gap in gaps:
        found[gap.before, gap.after].append(gap.ns)
    made = [
        Transition(
            before, after, len(ns), median(ns) / 1e3, max(ns) / 1e3, sum(ns) / 1e3 / max(steps, 1)
        )
        for (before, after), ns in found.items()
    ]
    return sorted(made, key=lambda transition: -transition.us_per_step)


def allocations(records: Records, steps: int) -> list[CallCost]:
    """API calls that allocate or free, most calls first."""
    times: dict[str, list[int]] = defaultdict(list)
    for call in records.calls:
        if classify(call.name) is CallKind.ALLOCATION:
            times[call.name].append(call.end - call.start)
    made = [
        CallCost(name, len(ns), fmean(ns) / 1e3, len(ns) / max(steps, 1))
        for name, ns in times.items()
    ]
    return sorted(made, key=lambda cost: -cost.calls)


class CopyCost(NamedTuple):
    """Copies of one direction and kind of memory: count, bytes, mean microseconds, GB/s (0 where
    sizes are not known).
    """

    name: str
    times: int
    bytes: int
    mean_us: float
    gb_per_s: float


def copies(records: Records) -> list[CopyCost]:
    """Copies on the device or the host streams, by name."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in records.device:
        if span.kind is DeviceKind.COPY:
            found[span.name].append((span.end - span.start, span.bytes))
    made = []
    for name, items in sorted(found.items()):
        ns, size = sum(item[0] for item in items), sum(item[1] for item in items)
        made.append(
            CopyCost(name, len(items), size, ns / len(items) / 1e3, size / ns if ns else 0.0)
        )
    return made
