"""Medians of a run while it is steady.

The period of a blocking step ends when the host has woken up, which takes no fixed time. A median
of single steps leaves out the long side of that distribution, though every run pays for it. So
medians here are of means over WINDOW steps in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.attribution.steps import StepLog, StepRecord
from photon_ext.runtime.step import StepKind

WARM_UP = 8  # steps left out of medians
WINDOW = 8  # steps whose mean is one value of a median,
WINDOWS = 8  # unless that would leave fewer values than this
ENOUGH = 4  # prefill steps of a size; fewer have no median


class Medians(NamedTuple):
    """Steady medians of runs at one depth, milliseconds; None where they had no such step.

    Attributes:
        decode: decode steps of a full batch (`StepRecord.steady`).
        prefills: prefill steps by the requests in them, up to a power of two.
        dead: steps of nothing but zombies.
        device: time on the device of ordinary full decode steps, those without a prefill step
            before or after them; with timing.
        gap: idle time of the device before them, which is the host's part; with timing.
    """

    decode: float | None = None
    prefills: Mapping[int, float] = {}
    dead: float | None = None
    device: float | None = None
    gap: float | None = None

    def prefill(self, requests: int) -> float | None:
        """A prefill step of so many requests, or of the nearest smaller size that has a median."""
        if not self.prefills:
            return None
        smaller = (size for size in self.prefills if size < 2 * requests)
        return self.prefills[max(smaller, default=min(self.prefills))]

    def mean_prefill(self, groups: Mapping[int, float]) -> float | None:
        """A prefill step, where `groups` has the share (0..1) of steps with so many requests."""
        times = [(self.prefill(requests), share) for requests, share in groups.items()]
        if not self.prefills:
            return None
        return sum(ms * share for ms, share in times if ms is not None)


def medians(logs: Sequence[StepLog], streams: int) -> Medians:
    """Steady medians of runs."""
    timed = [each for log in logs for each in _begun(log, streams)]
    ordinary = [step for log in logs for step in ordinary_steps(log, streams)]
    dead = [
        ms
        for log in logs
        for step, ms in log.intervals_ms()
        if step.dead and step.kind is StepKind.DECODE
    ]
    device, gap = device_and_gap(ordinary)
    return Medians(
        decode=typical([ms for step, ms in timed if step.steady(streams)]),
        prefills=_prefills(timed),
        dead=typical(dead),
        device=device,
        gap=gap,
    )


def ordinary_steps(log: StepLog, streams: int) -> list[StepRecord]:
    """Full decode steps of a run with no prefill step right before or after them."""
    prefill = [False, *(step.kind is StepKind.PREFILL for step in log.steps), False]
    return [
        step
        for i, step in enumerate(log.steps)
        if step.steady(streams) and not prefill[i] and not prefill[i + 2]
    ]


def device_and_gap(steps: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Median milliseconds on the device, and of idle time before; None without timing."""
    device = typical([step.device_us / 1e3 for step in steps if step.device_us is not None])
    gap = typical([step.gap_us / 1e3 for step in steps if step.gap_us is not None])
    return device, gap


def typical(values: Sequence[float]) -> float | None:
    """The median over windows of the mean; None without values."""
    size = max(1, min(WINDOW, len(values) // WINDOWS))
    means = [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    return median(means) if means else None


def _prefills(timed: Sequence[tuple[StepRecord, float]]) -> dict[int, float]:
    """Medians by size; one for all, as if of the smallest, where no size has ENOUGH steps."""
    times: dict[int, list[float]] = {}
    for step, ms in timed:
        if step.kind is StepKind.PREFILL and not step.dead:
            times.setdefault(1 << (step.rows - 1).bit_length(), []).append(ms)
    every = [ms for values in times.values() for ms in values]
    enough = {size: each for size, each in times.items() if len(each) >= ENOUGH} or {1: every}
    found = ((size, typical(each)) for size, each in sorted(enough.items()))
    return {size: ms for size, ms in found if ms is not None}


def _begun(log: StepLog, streams: int) -> list[tuple[StepRecord, float]]:
    """Steps with their periods, but for the first WARM_UP full ones, at most half of all."""
    timed = log.intervals_ms()
    first = next((i for i, (step, _) in enumerate(timed) if step.steady(streams)), 0)
    return timed[min(first + WARM_UP, len(timed) // 2) :]
