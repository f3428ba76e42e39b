"""Whether a stage helped, in a sentence made from its figures and those of the stage before."""

from __future__ import annotations

import math
from typing import NamedTuple

NOISE = 0.03  # a smaller share of a step is no difference


class Figures(NamedTuple):
    """What was measured of a stage.

    Attributes:
        ms: milliseconds of a steady step.
        spread: half the range of `ms` over repeated runs; infinite after one run.
        kernel_ms: how long the device worked for a step; None without activity records.
    """

    ms: float
    spread: float
    kernel_ms: float | None = None


def verdict(before: Figures | None, after: Figures) -> str:
    """Help, or none. `before` is the stage below that could be measured, if there is one."""
    if before is None:
        return "the start"
    ratio, difference = before.ms / after.ms, abs(before.ms - after.ms)
    spread = max(before.spread, after.spread)
    if difference <= NOISE * before.ms:
        found = "no help here"
    elif spread == math.inf:
        return f"cannot be told from one run, x{ratio:.2f}: give more --repeats"
    elif difference <= spread:
        runs = f"runs differ by up to {2 * spread:.3g} ms a step; measure on a quieter machine"
        return f"cannot be told, x{ratio:.2f}: {runs}"
    else:
        found = "slower" if ratio < 1 else "helps"
    said = f"{found}, x{ratio:.2f}: {before.ms:.3g} to {after.ms:.3g} ms"
    if before.kernel_ms is None or after.kernel_ms is None:
        return said
    return f"{said}; kernels alone {before.kernel_ms:.3g} to {after.kernel_ms:.3g} ms"
