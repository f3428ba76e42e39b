"""Everything a timeline says, as values, as JSON, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from photon_ext.observe.analysis.findings import Finding, find_all
from photon_ext.observe.analysis.gaps import Gap, GapKind, find_gaps, step_gaps
from photon_ext.observe.analysis.host import OpCost, op_costs, phase_costs
from photon_ext.observe.analysis.kernels import (
    Bin,
    CallCost,
    CopyCost,
    KernelShare,
    StepFigures,
    Transition,
    allocations,
    copies,
    histogram,
    kernel_shares,
    step_figures,
    transitions,
)
from photon_ext.observe.analysis.phases import phase_times
from photon_ext.observe.analysis.steps import Steps, find_steps
from photon_ext.observe.numbers import percentile
from photon_ext.observe.records import Records


class Options(NamedTuple):
    """What the analysis was told; see `timeline`."""

    marker: str | None = None
    marker_ends: bool = False
    bytes_per_step: int | None = None
    bytes_note: str = ""


class GapFigures(NamedTuple):
    """Gaps of one kind in steady steps, summed per step (0 where there is none): microseconds."""

    steps: int
    median_us: float
    mean_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True)
class Report:
    """What the records say. Times are microseconds where a name ends in `_us`; means and medians
    are of steady steps where they say so.

    Attributes:
        backend: "cuda", "host", or None without records of a device.
        method, marker: how steps were found (StepMethod), and the kernel that begins or ends them,
            where there is one.
        steps, gaps: all of them, in nanoseconds; not in `as_dict`.
        figures: medians of steady steps; None without any.
        wall_us: from the first step's start to the last one's end, without the time when there was
            no work.
        active: share of that time outside of step gaps (split gaps count as such); None without
            steps.
        busy: share of it with at least one kernel running.
        step_gap, split_gap, node_gap: see GapKind; split gaps are of steps with late sampling.
        waited_us: microseconds per steady step by what the device waited for, step and split gaps.
        phases_us: median time on the device, by phase of a step of ours.
        host_us: host time per step, by phase.
        shares, histogram, transitions: kernels, gap lengths, and gaps by the kernels around them,
            of steady steps.
        allocations, copies, ops: API calls that allocate or free, copies by direction and memory,
            torch ops by their own time; of the whole recording.
        allocator_per_step: requests to torch's CUDA allocator per step; None without it, or without
            steps.
        rows, zombies: rows of committed steps; of them, those whose sequence had ended.
        findings: what is wrong, costliest first.
        clock_us: how well the clocks agree: host, drift, device (ClockError).
        dropped: records for which there was no room.
        bytes_per_step, bytes_note, bandwidth_gb_s: what a step moves as it was told, what that
            counts in words, and that per time.
        excluded: steps that are not steady: number, reason, wall time and gap before them,
            microseconds.
    """

    backend: str | None
    method: str
    marker: str | None
    steps: Steps
    gaps: list[Gap]
    wall_us: float
    active: float | None
    busy: float | None
    figures: StepFigures | None
    step_gap: GapFigures | None
    split_gap: GapFigures | None
    node_gap: GapFigures | None
    waited_us: dict[str, float]
    excluded: list[tuple[int, str, float, float]]
    shares: list[KernelShare]
    histogram: list[Bin]
    transitions: list[Transition]
    allocations: list[CallCost]
    allocator_per_step: float | None
    copies: list[CopyCost]
    bytes_per_step: int | None
    bytes_note: str
    bandwidth_gb_s: float | None
    phases_us: dict[str, float]
    host_us: dict[str, float]
    ops: list[OpCost]
    rows: int
    zombies: int
    findings: list[Finding]
    clock_us: tuple[float, float, float]
    dropped: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but single gaps and kernels."""
        plain = {name: value for name, value in vars(self).items() if name not in ("steps", "gaps")}
        for name in ("shares", "histogram", "transitions", "allocations", "copies", "ops"):
            plain[name] = [item._asdict() for item in plain[name]]
        for name in ("figures", "step_gap", "split_gap", "node_gap"):
            plain[name] = plain[name]._asdict() if plain[name] is not None else None
        plain["findings"] = [
            {**finding._asdict(), "kind": finding.kind.value} for finding in self.findings
        ]
        plain["excluded"] = [
            dict(zip(("step", "why", "wall_us", "gap_us"), row, strict=True))
            for row in self.excluded
        ]
        plain["clock_us"] = dict(zip(("host", "drift", "device"), self.clock_us, strict=True))
        return {
            "step_count": len(self.steps.steps),
            "steady_steps": len(self.steps.steady),
            **plain,
        }

    def text(self) -> str:
        """For people: findings first, then the tables."""
        from photon_ext.observe.analysis.text import lines

        return "\n".join(lines(self)) + "\n"


NO_OPTIONS = Options()


def make_report(records: Records, options: Options = NO_OPTIONS) -> Report:
    """The whole analysis."""
    steps = find_steps(records, options.marker, options.marker_ends)
    gaps = find_gaps(steps, records)
    steady = {step.number for step in steps.steady}
    count = len(steady)
    inside = [gap for gap in gaps if gap.step in steady and gap.kind is not GapKind.REST]
    figures = step_figures(steps, gaps)
    rest = sum(gap.ns for gap in gaps if gap.kind is GapKind.REST)
    wall = steps.steps[-1].end - steps.steps[0].start - rest if steps.steps else 0
    idle = sum(gap.ns for gap in step_gaps(gaps))
    split = [step.number for step in steps.steady if step.launch is not None and step.launch.split]
    return Report(
        backend=records.backend,
        method=steps.method.value,
        marker=steps.marker,
        steps=steps,
        gaps=gaps,
        wall_us=wall / 1e3,
        active=1 - idle / wall if wall else None,
        busy=1 - (sum(gap.ns for gap in gaps) - rest) / wall if wall else None,
        figures=figures,
        step_gap=_gap_figures(inside, GapKind.STEP, steady),
        split_gap=_gap_figures(inside, GapKind.SPLIT, split),
        node_gap=_gap_figures(inside, GapKind.NODE, steady),
        waited_us=_waited(step_gaps(inside), count),
        excluded=_excluded(steps, gaps),
        shares=kernel_shares(steps),
        histogram=histogram(inside, count),
        transitions=transitions(inside, count),
        allocations=allocations(records, len(steps.steps)),
        allocator_per_step=records.allocator / len(steps.steps)
        if records.allocator is not None and steps.steps
        else None,
        copies=copies(records),
        bytes_per_step=options.bytes_per_step,
        bytes_note=options.bytes_note,
        bandwidth_gb_s=options.bytes_per_step / figures.wall_us / 1e3
        if options.bytes_per_step and figures
        else None,
        phases_us=phase_times(steps, records),
        host_us=phase_costs(records),
        ops=op_costs(records),
        rows=sum(commit.rows for commit in records.commits),
        zombies=sum(commit.zombies for commit in records.commits),
        findings=find_all(records, steps, gaps),
        clock_us=(
            records.clock.host_ns / 1e3,
            records.clock.drift_ns / 1e3,
            records.clock.device_ns / 1e3,
        ),
        dropped=records.dropped,
    )


def _gap_figures(gaps: Iterable[Gap], kind: GapKind, steps: Iterable[int]) -> GapFigures | None:
    per_step = dict.fromkeys(steps, 0)
    for gap in gaps:
        if gap.kind is kind:
            per_step[gap.step] += gap.ns
    ns = list(per_step.values())
    if not ns:
        return None
    return GapFigures(
        len(ns), median(ns) / 1e3, fmean(ns) / 1e3, percentile(ns, 0.99) / 1e3, max(ns) / 1e3
    )


def _waited(gaps: Iterable[Gap], steps: int) -> dict[str, float]:
    total: Counter[str] = Counter()
    for gap in gaps:
        for share in gap.shares:
            total[share.cause.value] += share.ns
    return {cause: ns / 1e3 / max(steps, 1) for cause, ns in total.most_common()}


def _excluded(steps: Steps, gaps: Iterable[Gap]) -> list[tuple[int, str, float, float]]:
    before = {gap.step: gap.ns for gap in gaps if gap.kind in (GapKind.STEP, GapKind.REST)}
    return [
        (
            step.number,
            step.excluded,
            (step.end - step.start) / 1e3,
            before.get(step.number, 0) / 1e3,
        )
        for step in steps.steps
        if step.excluded is not None
    ]
