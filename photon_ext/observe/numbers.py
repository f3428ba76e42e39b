"""The percentile of measurements, and checks of numbers that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from photon_ext.errors import ConfigError


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` (0..1) of them do not exceed: the nearest
    rank. `values` must not be empty.
    """
    rank = math.ceil(share * len(values) - 1e-9)  # 0.07 x 100 is a little more than 7
    return sorted(values)[max(rank, 1) - 1]


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}; give a positive number")


def check_not_negative(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value!r}; give a number from 0 on")
