"""Checks of numbers that are given."""

from __future__ import annotations

import math

from photon_ext.errors import ConfigError


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}; give a positive number")


def check_not_negative(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value!r}; give a number from 0 on")
