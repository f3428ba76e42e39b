"""Everything a timeline says, as values, as JSON, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import Any, NamedTuple

from photon_ext.observe.analysis.gaps import Cause, Gap, GapKind, find_gaps, idle_gaps
from photon_ext.observe.analysis.host import (
    CallCost,
    LateCopies,
    costly_calls,
    late_copies,
    phase_costs,
)
from photon_ext.observe.analysis.kernels import (
    KernelShare,
    StepFigures,
    kernel_shares,
    step_figures,
)
from photon_ext.observe.analysis.steps import Steps, find_steps
from photon_ext.observe.meter import percentile
from photon_ext.observe.records import Records

SHOWN = 12  # rows of a table; the JSON has them all


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


class Excluded(NamedTuple):
    """A step that is not steady: number, reason, wall time and gap before it, microseconds."""

    step: int
    why: str
    wall_us: float
    gap_us: float


class Zombies(NamedTuple):
    """Rows of committed steps; of them, those whose sequence had ended; steps of nothing else, and
    what those took of the device, microseconds."""

    rows: int
    zombies: int
    steps: int
    us: float


@dataclass(frozen=True)
class Report:
    """What the records say. Times are microseconds where a name ends in `_us`.

    Attributes:
        backend: "cuda", "host", or None without records of a device.
        method, marker: how steps were found (StepMethod), and the kernel that begins or ends them,
            where there is one.
        steps, gaps: all of them, in nanoseconds; not in `as_dict`.
        wall_us: from the first step's start to the last one's end, without the time when there was
            no work.
        active: share of that time outside of step gaps (split gaps count as such); None without
            steps. busy: share of it with at least one kernel running.
        figures: medians of steady steps; None without any.
        step_gap, split_gap, node_gap: see GapKind; split gaps are of steps with late sampling.
        waited_us: mean per steady step in step and split gaps, by whom the device waited for.
        descheduled_us: mean per steady step, node gaps included, in which the system had taken the
            thread of a host stream off the CPU.
        host_us: host time per step, by phase.
        shares: kernels of steady steps.
        calls: calls that block the host or allocate. late_copies: copies of results that ran
            behind the next step. Both of the whole recording.
        zombies: rows of the committed steps, and those whose sequence had ended.
        excluded: steps that are not steady.
        bytes_per_step, bytes_note: what a step moves as it was told, and what that counts.
        bandwidth_gb_s: the former per time of a steady step.
        clock_us: how well the clocks agree: host, drift, device (ClockError).
        dropped: records for which there was no room.
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
    descheduled_us: float
    host_us: dict[str, float]
    shares: list[KernelShare]
    calls: list[CallCost]
    late_copies: LateCopies | None
    zombies: Zombies
    excluded: list[Excluded]
    bytes_per_step: int | None
    bytes_note: str
    bandwidth_gb_s: float | None
    clock_us: dict[str, float]
    dropped: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but single gaps and kernels."""
        plain = {name: _plain(value) for name, value in vars(self).items()}
        counts = {"step_count": len(self.steps.steps), "steady_steps": len(self.steps.steady)}
        return {**counts, **{k: v for k, v in plain.items() if k not in ("steps", "gaps")}}

    def text(self) -> str:
        """For people: figures of steps first, then the tables."""
        return "\n".join((*_head(self), *_tables(self))) + "\n"

    @property
    def backend_text(self) -> str:
        """Whose device it was: "host" alone would read as the host, against the device."""
        return f"{self.backend} backend" if self.backend is not None else "no device records"


NO_OPTIONS = Options()


def make_report(records: Records, options: Options = NO_OPTIONS) -> Report:
    """The whole analysis."""
    steps = find_steps(records, options.marker, options.marker_ends)
    gaps = find_gaps(steps, records)
    steady = {step.number for step in steps.steady}
    split = {s.number for s in steps.steady if s.launch is not None and s.launch.split}
    inside = [gap for gap in gaps if gap.step in steady]
    figures = step_figures(steps, gaps)
    rest = sum(gap.ns for gap in gaps if gap.kind is GapKind.REST)
    wall = steps.steps[-1].end - steps.steps[0].start - rest if steps.steps else 0
    idle = sum(gap.ns for gap in idle_gaps(gaps))
    size, clock = options.bytes_per_step, records.clock
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
        waited_us=_waited(idle_gaps(inside), len(steady)),
        descheduled_us=_waited(inside, len(steady)).get(Cause.DESCHEDULED.value, 0.0),
        host_us=phase_costs(records),
        shares=kernel_shares(steps),
        calls=costly_calls(records),
        late_copies=late_copies(records, steps),
        zombies=_zombies(records, steps),
        excluded=_excluded(steps, gaps),
        bytes_per_step=size,
        bytes_note=options.bytes_note,
        bandwidth_gb_s=size / figures.wall_us / 1e3 if size and figures else None,
        clock_us={name.removesuffix("_ns"): ns / 1e3 for name, ns in clock._asdict().items()},
        dropped=records.dropped,
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _gap_figures(gaps: Iterable[Gap], kind: GapKind, steps: Iterable[int]) -> GapFigures | None:
    per_step = dict.fromkeys(steps, 0)
    for gap in gaps:
        if gap.kind is kind:
            per_step[gap.step] += gap.ns
    us = [ns / 1e3 for ns in per_step.values()]
    if not us:
        return None
    return GapFigures(len(us), median(us), fmean(us), percentile(us, 0.99), max(us))


def _waited(gaps: Iterable[Gap], steps: int) -> dict[str, float]:
    total: Counter[str] = Counter()
    for gap in gaps:
        for share in gap.shares:
            total[share.name] += share.ns
    return {name: ns / 1e3 / max(steps, 1) for name, ns in total.most_common()}


def _zombies(records: Records, steps: Steps) -> Zombies:
    commits = records.commits
    dead = {commit.step for commit in commits if 0 < commit.rows == commit.zombies}
    spent = (s.end - s.start for s in steps.steps if s.launch and s.launch.step in dead)
    rows, zombies = sum(c.rows for c in commits), sum(c.zombies for c in commits)
    return Zombies(rows, zombies, len(dead), sum(spent) / 1e3)


def _excluded(steps: Steps, gaps: Iterable[Gap]) -> list[Excluded]:
    before = {gap.step: gap.ns for gap in gaps if gap.kind in (GapKind.STEP, GapKind.REST)}
    return [
        Excluded(s.number, s.excluded, (s.end - s.start) / 1e3, before.get(s.number, 0) / 1e3)
        for s in steps.steps
        if s.excluded is not None
    ]


def _head(report: Report) -> Iterator[str]:
    count = len(report.steps.steps)
    steady = f"{count} steps, {len(report.steps.steady)} of them steady, by {report.method}"
    found = steady if count else "no steps were found on the device"
    yield f"{report.backend_text}: {found}"
    if report.active is not None and report.busy is not None:
        yield (
            f"active {report.active:.2%} of {report.wall_us / 1e3:.2f} ms (outside of step gaps); "
            f"a kernel runs {report.busy:.2%}"
        )
    if (f := report.figures) is not None:
        yield (
            f"steady step: {f.wall_us:.1f} us, kernels run {f.busy_us:.1f} us, idle "
            f"{f.gap_us:.1f} us ({f.gap_share:.1%}, all gaps together), {f.kernels} kernels "
            "(medians)"
        )
    for name, gap in (
        ("step gap, between two steps", report.step_gap),
        ("split gap, before late sampling", report.split_gap),
        ("node gaps, between the kernels of a step, all together", report.node_gap),
    ):
        if gap is not None:
            yield (
                f"{name}: {gap.median_us:.1f} us median, {gap.mean_us:.1f} mean, "
                f"{gap.p99_us:.1f} p99, {gap.max_us:.1f} max"
            )
    if report.bandwidth_gb_s is not None and report.bytes_per_step is not None:
        moved = f"{report.bytes_per_step / 1e6:.1f} MB per step{report.bytes_note}"
        yield f"effective bandwidth: {report.bandwidth_gb_s:.1f} GB/s, of {moved}"
    yield from _remarks(report)


def _remarks(report: Report) -> Iterator[str]:
    if report.descheduled_us:
        yield (
            f"descheduled: the system kept the device's thread off the CPU for "
            f"{report.descheduled_us:.0f} us per steady step (mean); that counts as gap"
        )
    if (z := report.zombies).rows:
        alone = f"; {z.steps} steps had no other rows and took {z.us:.0f} us of the device"
        yield f"zombies: {z.zombies} of {z.rows} rows{alone if z.steps else ''}"
    if (late := report.late_copies) is not None:
        yield (
            f"{late.copies} copies of results to the host ran behind the next step, {late.us:.0f} "
            "us after their own step (median): the host could not commit before; enqueue the copy, "
            "or record the event it waits for, before the next step is launched"
        )
    clock = report.clock_us
    yield (
        f"clocks agree within {clock['host']:.1f} us (drift {clock['drift']:.1f} us; kernels seem "
        f"to lead their launch by at most {clock['device']:.1f} us)"
    )
    if report.dropped:
        yield (
            f"{report.dropped} records found no room: give timeline() a larger capacity, or record "
            "less"
        )


def _tables(report: Report) -> Iterator[str]:
    for title, per_phase in (
        ("the device waited in step and split gaps, mean per steady step, for", report.waited_us),
        ("host time per step, by phase", report.host_us),
    ):
        yield from _table(title, ("", "us"), [(k, f"{us:.1f}") for k, us in per_phase.items()])
    yield from _table(
        "calls that block the host or allocate",
        ("", "calls", "us each (median)"),
        [
            (
                f"{c.cause.value}: {c.name}{' in ' * bool(c.where)}{c.where}",
                f"{c.calls}",
                f"{c.us:.1f}",
            )
            for c in report.calls
        ],
    )
    yield from _table(
        "kernels of steady steps",
        ("", "share", "mean us", "per step"),
        [
            (s.name, f"{s.share:.1%}", f"{s.mean_us:.1f}", f"{s.per_step:.1f}")
            for s in report.shares
        ],
    )
    yield from _table(
        f"steps kept out of steady figures ({len(report.excluded)})",
        ("step", "why", "us", "gap before us"),
        [(f"{e.step}", e.why, f"{e.wall_us:.0f}", f"{e.gap_us:.0f}") for e in report.excluded],
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A titled table; the first column to the left, the others to the right. Nothing without
    rows."""
    if not rows:
        return
    shown = (header, *rows[:SHOWN])
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    yield f"\n{title}:"
    for first, *others in shown:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join(("", first.ljust(widths[0]), *cells)).rstrip()
