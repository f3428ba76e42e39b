"""Order statistics of short series of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from photon_ext.observe.meter import percentile


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
