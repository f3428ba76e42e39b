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
        spread: half the range of `ms` over repeated runs, milliseconds; infinite after one run,
            which tells nothing.
        allocations: requests to torch's allocator per step; None if not counted.
        kernel_ms: how long the device worked for a step; None without activity records.
        step_gap_ms: by those records, how long it waited before a step's first kernel; None without
            them.
    """

    ms: float
    spread: float
    allocations: float | None = None
    kernel_ms: float | None = None
    step_gap_ms: float | None = None

    @property
    def idle_ms(self) -> float | None:
        return None if self.kernel_ms is None else max(0.0, self.ms - self.kernel_ms)


def verdict(stage: Stage, before: Figures | None, after: Figures, on_cpu: bool) -> str:
    """Help, or why not.

    `before` is the stage below that could be measured, None for the first one.
    """
    if before is None:
        return "the start" + (f": {_device(None, after)}" if after.kernel_ms is not None else "")
    ratio, difference, spread = (
        before.ms / after.ms,
        abs(before.ms - after.ms),
        max(before.spread, after.spread),
    )
    if difference <= NOISE * before.ms:
        return f"no help here, x{ratio:.2f}: {_reason(stage, before, after, on_cpu)}"
    if spread == math.inf:
        return f"cannot be told from one run, x{ratio:.2f}: give more --repeats"
    if difference <= spread:
        recorded = before.idle_ms is not None and after.idle_ms is not None
        reason = (
            _reason(stage, before, after, on_cpu) if recorded else "measure on a quieter machine"
        )
        return (
            f"cannot be told, x{ratio:.2f}: runs differ by up to {2 * spread:.3g} ms a step; "
            f"{reason}"
        )
    if ratio < 1:
        return f"slower, x{ratio:.2f}: {_reason(stage, before, after, on_cpu)}"
    return f"helps, x{ratio:.2f}: {_change(before, after)}"


def _change(before: Figures, after: Figures) -> str:
    """What became less."""
    if before.kernel_ms is not None and after.kernel_ms is not None:
        return _device(before, after)
    if (
        before.allocations is not None
        and after.allocations is not None
        and after.allocations < before.allocations
    ):
        return (
            f"{before.ms:.3g} to {after.ms:.3g} ms, {before.allocations:.0f} to "
            f"{after.allocations:.0f} allocations"
        )
    return f"{before.ms:.3g} to {after.ms:.3g} ms"


def _reason(stage: Stage, before: Figures, after: Figures, on_cpu: bool) -> str:
    """Why a stage did not help: on a GPU from its idle time, on a CPU from what a stage is for."""
    if on_cpu:
        return stage.on_cpu
    was, now = before.idle_ms, after.idle_ms
    if was is None or now is None or before.kernel_ms is None or after.kernel_ms is None:
        return "there are no activity records to say why"
    saved, spread = was - now, max(before.spread, after.spread)
    if was < NOISE * before.ms:
        return f"the device was busy already, {_device(before, after)}{_within(after)}"
    if saved > 0 and after.kernel_ms - before.kernel_ms > saved / 2:
        return f"the idle time it saves goes into longer kernels, {_device(before, after)}"
    if saved < -spread:
        return (
            f"the device waits longer{_for_whom(after)}, {_device(before, after)}{_within(after)}"
        )
    if saved > spread:
        return f"the device waits less, {_device(before, after)}"
    return f"the device waits as long as before, {_device(before, after)}"


def _for_whom(after: Figures) -> str:
    """Where it idles for longer than it works, the host sets the pace."""
    if after.idle_ms is None or after.kernel_ms is None or after.idle_ms <= after.kernel_ms:
        return ""
    return " for the host, which takes longer to launch the kernels than they run"


def _within(after: Figures) -> str:
    """Of idle time that a stage has added, what its steps wait for each other; the rest is
    between a step's own kernels.
    """
    if after.idle_ms is None or after.step_gap_ms is None or after.idle_ms < NOISE * after.ms:
        return ""
    return f", {min(after.step_gap_ms, after.idle_ms):.3g} ms of it between steps"


def _device(before: Figures | None, after: Figures) -> str:
    if before is None:
        return f"idle for {after.idle_ms:.3g} ms of a step, kernels {after.kernel_ms:.3g} ms"
    return (
        f"idle {before.idle_ms:.3g} to {after.idle_ms:.3g} ms, kernels {before.kernel_ms:.3g} "
        f"to {after.kernel_ms:.3g} ms"
    )
