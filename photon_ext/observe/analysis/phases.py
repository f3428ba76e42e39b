"""What the device did for a step of ours, by phase: copies, the head with its carry-over,
forward, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from statistics import median
from typing import NamedTuple

from photon_ext.observe.analysis.steps import HEAD_KERNEL, DeviceStep, StepMethod, Steps
from photon_ext.observe.records import DeviceSpan, Records

# parts of our kernels' names, on CUDA and on the host
_SAMPLING = ("apply_token_mask", "sample", "publish")


class DevicePhase(Enum):
    """A part of a step on the device. The forward of a prefill step is a phase of its own."""

    H2D = "copy in"
    CARRY_OVER = "carry-over"
    FORWARD = "forward"
    PREFILL = "prefill chunk"
    SAMPLING = "sampling"
    D2H = "copy out"


class PhaseSpan(NamedTuple):
    """Kernels of one phase that follow each other, from the first one's start to the last one's
    end.
    """

    phase: DevicePhase
    start: int
    end: int
    kernels: int


def phase_of(kernel: DeviceSpan, step: DeviceStep) -> DevicePhase:
    """Of a kernel of one of our steps, by its name.

    A sampling function of the caller's counts as forward.
    """
    if HEAD_KERNEL in kernel.name:
        return DevicePhase.CARRY_OVER
    if any(part in kernel.name for part in _SAMPLING):
        return DevicePhase.SAMPLING
    return (
        DevicePhase.PREFILL
        if step.launch is not None and step.launch.kind == "prefill"
        else DevicePhase.FORWARD
    )


def phase_spans(steps: Steps, step: DeviceStep) -> Iterator[PhaseSpan]:
    """The phases of one step, in order; of loops that are not ours none."""
    if steps.method is not StepMethod.HEAD:
        return
    for phase, kernels in groupby(steps.of(step), lambda kernel: phase_of(kernel, step)):
        group = list(kernels)
        yield PhaseSpan(phase, group[0].start, max(kernel.end for kernel in group), len(group))


def phase_times(steps: Steps, records: Records) -> dict[str, float]:
    """Median microseconds of each phase, of steady steps; copies, and prefill chunks, of all
    steps that have one.
    """
    found: dict[DevicePhase, list[int]] = {}
    for step in steps.steps:
        chosen = [
            span
            for span in phase_spans(steps, step)
            if step.excluded is None or span.phase is DevicePhase.PREFILL
        ]
        for phase in dict.fromkeys(span.phase for span in chosen):
            found.setdefault(phase, []).append(
                sum(span.end - span.start for span in chosen if span.phase is phase)
            )
    for phase, copies in (
        (DevicePhase.H2D, [span.end - span.start for span in records.device if span.is_in_copy]),
        (DevicePhase.D2H, [span.end - span.start for span in records.device if span.is_out_copy]),
    ):
        if copies:
            found[phase] = copies
    return {phase.value: median(found[phase]) / 1e3 for phase in DevicePhase if phase in found}
