"""How the full decode steps of observed runs went: what they took on average, at which contexts,
and whether that changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.common.numbers import summary
from benchmarks.common.step_log import StepLog

STRETCHES = 10


def course(logs: Sequence[StepLog], streams: int) -> dict[str, Any]:
    """For a result file; `stretches_ms` are the medians of one tenth of the steps after the
    other.
    """
    full = [(step, ms) for log in logs for step, ms in log.intervals_ms() if step.steady(streams)]
    if not full:
        return {}
    size = -(-len(full) // STRETCHES)
    device = [step.device_us / 1e3 for step, _ in full if step.device_us is not None]
    return {
        "step_ms": summary([ms for _, ms in full]),
        "device_ms": summary(device),
        "context": fmean(step.context for step, _ in full),
        "longest": fmean(step.longest for step, _ in full),
        "stretches_ms": [
            median(ms for _, ms in full[i : i + size]) for i in range(0, len(full), size)
        ],
    }
