"""Medians of a run while it is steady.

The period of a blocking step ends when the host has woken up, which takes no fixed time. A median
of single steps leaves out the long side of that distribution, though every run pays for it. So
medians here are of means over WINDOW steps in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.attribution.steps import StepLog, StepRecord
from photon_ext.runtime.step import StepKind

WARM_UP = 8  # steps left out of medians
WINDOW = 8  # steps whose mean is one value of a median,
WINDOWS = 8  # unless that would leave fewer values than this


class Medians(NamedTuple):
    """Steady medians of runs at one depth, milliseconds; None where they had no such step.

    Attributes:
        decode: decode steps of a full batch (`StepRecord.steady`).
        prefill: prefill steps: their mean, for they differ by how many requests begin in them.
        dead: steps of nothing but zombies.
        device: time on the device of ordinary full decode steps, those without a prefill step
            before or after them; with timing.
        gap: idle time of the device before them, which is the host's part; with timing.
    """

    decode: float | None = None
    prefill: float | None = None
    dead: float | None = None
    device: float | None = None
    gap: float | None = None


def medians(logs: Sequence[StepLog], streams: int) -> Medians:
    """Steady medians of runs."""
    timed = [each for log in logs for each in _begun(log, streams)]
    ordinary = [step for log in logs for step in _ordinary(log, streams)]
    prefills = [ms for step, ms in timed if step.kind is StepKind.PREFILL and not step.dead]
    every = [each for log in logs for each in log.intervals_ms()]
    return Medians(
        decode=typical([ms for step, ms in timed if step.steady(streams)]),
        prefill=fmean(prefills) if prefills else None,
        dead=typical([ms for step, ms in every if step.dead and step.kind is StepKind.DECODE]),
        device=typical([s.device_us / 1e3 for s in ordinary if s.device_us is not None]),
        gap=typical([s.gap_us / 1e3 for s in ordinary if s.gap_us is not None]),
    )


def _ordinary(log: StepLog, streams: int) -> list[StepRecord]:
    """Full decode steps of a run with no prefill step right before or after them."""
    prefill = [False, *(step.kind is StepKind.PREFILL for step in log.steps), False]
    return [
        step
        for i, step in enumerate(log.steps)
        if step.steady(streams) and not prefill[i] and not prefill[i + 2]
    ]


def typical(values: Sequence[float]) -> float | None:
    """The median over windows of the mean; None without values."""
    size = max(1, min(WINDOW, len(values) // WINDOWS))
    means = [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    return median(means) if means else None


def _begun(log: StepLog, streams: int) -> list[tuple[StepRecord, float]]:
    """Steps with their periods, but for the first WARM_UP full ones, at most half of all."""
    timed = log.intervals_ms()
    first = next((i for i, (step, _) in enumerate(timed) if step.steady(streams)), 0)
    return timed[min(first + WARM_UP, len(timed) // 2) :]
