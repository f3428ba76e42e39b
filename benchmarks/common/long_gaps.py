"""Where the device was idle for long between two steps, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common.cause import HELD_UP, Cause
from benchmarks.common.step_log import Part, Spent, StepLog

LONG_US = 50.0  # of a gap; on a GPU that has its next step waiting, one takes some 3
MOST = 10  # gaps shown one by one
SHARE = 0.5  # of a gap: what explains as much is its cause
NOT_THE_HOST = "the host launched as ever: the device began late"


def long_gaps(log: StepLog) -> dict[str, Any]:
    """For a result file: the gaps above LONG_US, how many and their sum, and the longest ones with
    what the host did before their step's launch; `above_us` is None where the log has no gaps.
    """
    gaps = [(step.gap_us, index) for index, step in enumerate(log.steps) if step.gap_us is not None]
    if not gaps:
        return {"above_us": None, "count": 0, "sum_ms": 0.0, "longest": []}
    long = sorted((gap for gap in gaps if gap[0] > LONG_US), reverse=True)
    usual = tuple(
        median(values)
        for values in zip(*(log.steps[index].ahead.parts for _, index in gaps), strict=True)
    )
    usual_us = median(gap_us for gap_us, _ in gaps)
    return {
        "above_us": LONG_US,
        "count": len(long),
        "sum_ms": sum(gap_us for gap_us, _ in long) / 1e3,
        "longest": [
            _described(log, index, gap_us, usual_us, usual) for gap_us, index in long[:MOST]
        ],
    }


def _described(
    log: StepLog, index: int, gap_us: float, usual_us: float, usual: Sequence[float]
) -> dict[str, Any]:
    """`step` counts from 0. `at_s`: seconds into the run.

    `host_ms`: what the host did from the launch before to this one.
    """
    step = log.steps[index]
    return {
        "step": index,
        "at_s": (step.ready_ns - log.begin_ns) / 1e9,
        "kind": step.kind.value,
        "rows": step.rows,
        "gap_us": gap_us,
        "host_ms": {part.name.lower(): ms for part, ms in zip(Part, step.ahead.parts, strict=True)},
        "usual_ms": {part.name.lower(): ms for part, ms in zip(Part, usual, strict=True)},
        "collected_ms": step.ahead.collected_ms,
        "cause": _cause(step.ahead, (gap_us - usual_us) / 1e3, usual),
    }


def _cause(ahead: Spent, over_ms: float, usual: Sequence[float]) -> str:
    """What made a gap `over_ms` longer than the median one: what took that much longer than it
    does as a rule.
    """
    if ahead.collected_ms > SHARE * over_ms:
        return Cause.GARBAGE.value
    more = [own - normal for own, normal in zip(ahead.parts, usual, strict=True)]
    if max(more) <= SHARE * over_ms:
        return NOT_THE_HOST
    part = list(Part)[more.index(max(more))]
    return (Cause.WAKE_UP if part is Part.WAIT else HELD_UP[part]).value


def long_gaps_text(found: dict[str, Any]) -> str:
    """The same in a sentence; "" where there is nothing to say."""
    if not found["count"]:
        return ""
    first = found["longest"][0]
    worst = (
        f"the longest {first['gap_us'] / 1e3:.1f} ms before step {first['step']} "
        f"({first['kind']}): {first['cause']}"
    )
    return (
        f"{found['count']} gaps above {found['above_us']:.0f} µs, {found['sum_ms']:.1f} ms in "
        f"all; {worst}"
    )
