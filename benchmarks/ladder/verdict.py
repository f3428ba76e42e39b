"""Whether a stage helped, in a sentence made from its figures and those of the stage before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.ladder.stages import Stage

NOISE = 0.03  # a smaller share of a step is no difference


@dataclass(frozen=True)
class Figures:
    """What was measured of a stage.

    Attributes:
        ms: milliseconds of a steady step.
        spread: half the range of `ms` over repeated runs; infinite after one run.
        allocations: requests to torch's allocator per step; None if not counted.
        kernel_ms: how long the device worked for a step; None without activity records.
    """

    ms: float
    spread: float
    allocations: float | None = None
    kernel_ms: float | None = None

    @property
    def idle_ms(self) -> float | None:
        return None if self.kernel_ms is None else max(0.0, self.ms - self.kernel_ms)


def verdict(stage: Stage, before: Figures | None, after: Figures, on_cpu: bool) -> str:
    """Help, or why not. `before` is the stage below that could be measured, if there is one."""
    if before is None:
        if after.kernel_ms is None:
            return "the start"
        idle = f"idle {after.idle_ms:.3g} ms of a step"
        return f"the start: {idle}, kernels {after.kernel_ms:.3g} ms"
    ratio, difference = before.ms / after.ms, abs(before.ms - after.ms)
    spread = max(before.spread, after.spread)
    if difference <= NOISE * before.ms:
        return f"no help here, x{ratio:.2f}: {_reason(stage, before, after, on_cpu)}"
    if spread == math.inf:
        return f"cannot be told from one run, x{ratio:.2f}: give more --repeats"
    if difference <= spread:
        runs = f"runs differ by up to {2 * spread:.3g} ms a step; measure on a quieter machine"
        return f"cannot be told, x{ratio:.2f}: {runs}"
    if ratio < 1:
        return f"slower, x{ratio:.2f}: {_reason(stage, before, after, on_cpu)}"
    return f"helps, x{ratio:.2f}: {_change(before, after)}"


def _change(before: Figures, after: Figures) -> str:
    """What became less."""
    device = _device(before, after)
    if device:
        return device
    counts = before.allocations, after.allocations
    saved = counts[0] is not None and counts[1] is not None and counts[1] < counts[0]
    fewer = f", {counts[0]:.0f} to {counts[1]:.0f} allocations" if saved else ""
    return f"{before.ms:.3g} to {after.ms:.3g} ms{fewer}"


def _reason(stage: Stage, before: Figures, after: Figures, on_cpu: bool) -> str:
    """Why a stage did not help: on a CPU from what it is for, on a GPU from its idle time."""
    if on_cpu:
        return stage.on_cpu
    was, now, device = before.idle_ms, after.idle_ms, _device(before, after)
    if was is None or now is None:
        return "there are no activity records to say why"
    if was < NOISE * before.ms:
        return f"the device was busy already, {device}"
    longer = (after.kernel_ms or 0.0) - (before.kernel_ms or 0.0)
    if was > now and longer > (was - now) / 2:
        return f"the idle time it saves goes into longer kernels, {device}"
    if abs(was - now) <= max(before.spread, after.spread):
        return f"the device waits as long as before, {device}"
    return f"the device waits {'less' if was > now else 'longer'}, {device}"


def _device(before: Figures, after: Figures) -> str:
    """Idle time and kernels of both; "" without activity records."""
    if before.kernel_ms is None or after.kernel_ms is None:
        return ""
    idle = f"idle {before.idle_ms:.3g} to {after.idle_ms:.3g} ms"
    return f"{idle}, kernels {before.kernel_ms:.3g} to {after.kernel_ms:.3g} ms"
