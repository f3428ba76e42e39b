"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext.observe.analysis.report import Report

SHOWN = 12  # rows of a table; the JSON has them all


def lines(report: Report) -> Iterator[str]:
    yield from _head(report)
    if report.findings:
        yield "\nfound:"
        yield from (f"  - {finding.text}" for finding in report.findings)
    elif report.steps.steps:
        yield "\nfound: nothing that costs a step 10 us or more"
    yield from _table(
        "the device waited in step and split gaps, mean per steady step, for",
        ("", "us"),
        [(name, f"{us:.1f}") for name, us in report.waited_us.items()],
    )
    yield from _table(
        "host time per step, by phase",
        ("", "us"),
        [(name, f"{us:.1f}") for name, us in report.host_us.items()],
    )
    yield from _table(
        "on the device, median of steady steps",
        ("", "us"),
        [(name, f"{us:.1f}") for name, us in report.phases_us.items()],
    )
    shares = [
        (s.name, f"{100 * s.share:.1f} %", f"{s.mean_us:.1f}", f"{s.per_step:.1f}")
        for s in report.shares[:SHOWN]
    ]
    yield from _table("kernels of steady steps", ("", "share", "mean us", "per step"), shares)
    bins = [
        (b.label, f"{b.times}", f"{100 * b.share:.1f} %", f"{b.us_per_step:.1f}")
        for b in report.histogram
        if report.gaps
    ]
    yield from _table(
        "all gaps by length (us); us/step is the mean per steady step",
        ("", "count", "share", "us/step"),
        bins,
    )
    moves = [
        (
            f"{t.before} -> {t.after}",
            f"{t.times}",
            f"{t.median_us:.1f}",
            f"{t.max_us:.1f}",
            f"{t.us_per_step:.1f}",
        )
        for t in report.transitions[:SHOWN]
    ]
    yield from _table(
        "all gaps by transition", ("", "count", "median us", "max us", "us/step"), moves
    )
    copied = [
        (c.name, f"{c.times}", f"{c.bytes}", f"{c.mean_us:.1f}", f"{c.gb_per_s:.2f}")
        for c in report.copies
    ]
    yield from _table("copies", ("", "count", "bytes", "mean us", "GB/s"), copied)
    calls = [
        (a.name, f"{a.calls}", f"{a.mean_us:.1f}", f"{a.per_step:.1f}") for a in report.allocations
    ]
    yield from _table("allocating calls", ("", "calls", "mean us", "per step"), calls)
    ops = [(op.name, f"{op.calls}", f"{op.own_us:.1f}") for op in report.ops[:SHOWN]]
    yield from _table("torch ops by their own time on the host", ("", "calls", "us"), ops)
    others = [
        (f"{number}", why, f"{wall:.0f}", f"{gap:.0f}")
        for number, why, wall, gap in report.excluded[:SHOWN]
    ]
    yield from _table(
        f"steps kept out of steady figures ({len(report.excluded)})",
        ("step", "why", "us", "gap before us"),
        others,
    )


def backend_text(report: Report) -> str:
    """Whose device it was, in words: "host" alone would read as the host, against the device."""
    return f"{report.backend} backend" if report.backend is not None else "no device records"


def _head(report: Report) -> Iterator[str]:
    steps, steady = len(report.steps.steps), len(report.steps.steady)
    found = (
        f"{steps} steps, {steady} of them steady, by {report.method}"
        if steps
        else "no steps were found on the device"
    )
    yield f"{backend_text(report)}: {found}"
    if report.active is not None and report.busy is not None:
        wall = report.wall_us / 1e3
        yield (
            f"active {100 * report.active:.2f} % of {wall:.2f} ms (outside of step gaps); a "
            f"kernel runs {100 * report.busy:.2f} %"
        )
    if report.figures is not None:
        f = report.figures
        gaps = f"idle {f.gap_us:.1f} us ({100 * f.gap_share:.1f} %, all gaps together)"
        yield (
            f"steady step: {f.wall_us:.1f} us, kernels run {f.busy_us:.1f} us, {gaps}, "
            f"{f.kernels} kernels (medians)"
        )
    if report.step_gap is not None:
        g = report.step_gap
        yield (
            f"step gap, between two steps: {g.median_us:.1f} us median, {g.mean_us:.1f} mean, "
            f"{g.p99_us:.1f} p99, {g.max_us:.1f} max"
        )
    if report.split_gap is not None:
        yield (
            f"split gap, before late sampling: {report.split_gap.median_us:.1f} us median, "
            f"{report.split_gap.max_us:.1f} max"
        )
    if report.node_gap is not None:
        n = report.node_gap
        yield (
            "node gaps, between the kernels of a step, all of a step together: "
            f"{n.median_us:.1f} us median, {n.mean_us:.1f} mean"
        )
    if report.bandwidth_gb_s is not None and report.bytes_per_step is not None:
        yield (
            f"effective bandwidth: {report.bandwidth_gb_s:.1f} GB/s, of "
            f"{report.bytes_per_step / 1e6:.1f} MB per step{report.bytes_note}"
        )
    if report.rows:
        yield f"zombies: {report.zombies} of {report.rows} rows"
    if report.allocator_per_step is not None:
        yield f"torch's allocator: {report.allocator_per_step:.1f} requests per step"
    host, drift, device = report.clock_us
    yield (
        f"clocks agree within {host:.1f} us (drift {drift:.1f} us; kernels seem to lead their "
        f"launch by at most {device:.1f} us)"
    )
    if report.dropped:
        yield (
            f"{report.dropped} records found no room: give timeline() a larger capacity, or "
            "record less"
        )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A titled table; the first column to the left, the others to the right.

    Nothing without rows.
    """
    if not rows:
        return
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    yield f"\n{title}:"
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(("", first.strip().ljust(widths[0]), *others)).rstrip()
