"""Order statistics of short series of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie, by the nearest rank; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """Median, mean, 99th percentile and count; None without values."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "p99": percentile(values, 0.99),
        "count": len(values),
    }
