"""What a run is like while it is steady: medians of its steps' periods, by kind, and what they
depend on.

The period of a blocking step ends when the host has woken up, and that takes no fixed time: on a
virtual machine a few microseconds once, most of a millisecond the next time. The median of single
steps leaves such a distribution's long side out, though every run pays for it. So medians here are
of means over WINDOW steps in a row: what happens all the time is in them, what happens now and then
is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import fmean, median
from typing import NamedTuple

import torch

from benchmarks.common.step_log import Part, StepLog, StepRecord
from photon_ext.runtime.step import StepKind

WARM_UP = 8  # steps left out of medians
WINDOW = 8  # steps whose mean is one value of a median,
WINDOWS = 8  # unless that would leave fewer values than this
FAR_OFF = 0.3  # of a step, from the middle one: no context does that
ENOUGH = 4  # prefill steps of a size; fewer have no median
FEWEST = 64  # steps from which it can be told what a token of context costs


class Beside(Enum):
    """Whether prefill steps lie right before and behind a decode step: there requests end and
    are admitted, and the batch changes.
    """

    NOTHING = "neither"
    BEFORE = "before a prefill"
    BEHIND = "behind a prefill"
    BETWEEN = "between two"


class Sort(NamedTuple):
    """Full decode steps of one sort: their median, milliseconds, and their share of all of them,
    0..1.
    """

    ms: float
    share: float


class Pace(NamedTuple):
    """Ordinary full decode steps, those with nothing beside them, by the device's own events:
    medians, milliseconds.

    Attributes:
        device_ms: from a step's first event to its last. The first is recorded before the step is
            launched: where the device waits for the host, as at depth 1, what the host takes to
            launch the graph lies in it.
        gap_ms: from the last event of the step before to the first of its own.
    """

    device_ms: float
    gap_ms: float


class Medians(NamedTuple):
    """Steady medians of runs at one depth, milliseconds; None where they had no such step.

    Attributes:
        sorts: decode steps of a full batch (`StepRecord.steady`), by what is beside them.
        prefills: prefill steps after the first ones, by the requests in them, up to a power of two:
            those ride the same graph.
        dead: steps of nothing but zombies.
        device: device time of full decode steps, with timing.
        pace: of the ordinary ones, with timing.
        context: tokens that a row of the full decode steps attends to, on average. longest: that
            the longest one does.
        per_token, per_longest: milliseconds of a full decode step for a token more of the one, and
            of the other; with timing, of its time on the device, where contexts matter and the
            host's wake-ups do not.
        skew: milliseconds that the median of the ordinary ones differs by from one at the mean
            contexts, because of its own.
        parts: milliseconds of a full decode step by what the host does, in the order of Part.
    """

    sorts: Mapping[Beside, Sort] = {}
    prefills: Mapping[int, float] = {}
    dead: float | None = None
    device: float | None = None
    pace: Pace | None = None
    context: float = 0.0
    longest: float = 0.0
    per_token: float = 0.0
    per_longest: float = 0.0
    skew: float = 0.0
    parts: tuple[float, ...] = (0.0,) * len(Part)

    @property
    def decode(self) -> float | None:
        """A decode step of a full batch: every sort as often as it came."""
        return sum(sort.ms * sort.share for sort in self.sorts.values()) if self.sorts else None

    def grown(self, step: StepRecord) -> float:
        """What a full decode step takes more because its contexts are longer than those of the
        medians, milliseconds.
        """
        return (
            self.per_token * (step.context - self.context)
            + self.per_longest * (step.longest - self.longest)
            - self.skew
        )

    def prefill(self, requests: int) -> float | None:
        """A prefill step of so many requests; where that size has no median, the nearest smaller
        one that has, or else the smallest.
        """
        if not self.prefills:
            return None
        return self.prefills[
            max((size for size in self.prefills if size < 2 * requests), default=min(self.prefills))
        ]

    def mean_prefill(self, groups: Mapping[int, float]) -> float | None:
        """A prefill step, where so large a share (0..1) of them have so many requests."""
        times = [(self.prefill(requests), share) for requests, share in groups.items()]
        return sum(ms * share for ms, share in times if ms is not None) if self.prefills else None


AT_ANY_CONTEXT = Medians()


class Timed(NamedTuple):
    """A step with its period, milliseconds."""

    step: StepRecord
    ms: float
    beside: Beside


def timed_steps(log: StepLog) -> list[Timed]:
    """The steps of a run in order."""
    intervals = log.intervals_ms()
    prefills = [False, *(step.kind is StepKind.PREFILL for step, _ in intervals), False]
    return [
        Timed(step, ms, _BESIDE[prefills[i], prefills[i + 2]])
        for i, (step, ms) in enumerate(intervals)
    ]


_BESIDE = {
    (False, False): Beside.NOTHING,
    (False, True): Beside.BEFORE,
    (True, False): Beside.BEHIND,
    (True, True): Beside.BETWEEN,
}


def medians(logs: Sequence[StepLog], streams: int) -> Medians:
    """Steady medians of runs."""
    steps = [each for log in logs for each in begun(log, streams)]
    full = [each for each in steps if each.step.steady(streams)]
    ordinary = [each for each in full if each.beside is Beside.NOTHING]
    per_token, per_longest = _slopes(ordinary)
    found = Medians(
        sorts=_sorts(full),
        prefills=_prefills(
            [each for each in steps if each.step.kind is StepKind.PREFILL and not each.step.dead]
        ),
        dead=typical(
            [
                ms
                for log in logs
                for step, ms in log.intervals_ms()
                if step.kind is StepKind.DECODE and step.dead
            ]
        ),
        device=typical(
            [each.step.device_us / 1e3 for each in full if each.step.device_us is not None]
        ),
        pace=pace(full),
        context=fmean(each.step.context for each in full) if full else 0.0,
        longest=fmean(each.step.longest for each in full) if full else 0.0,
        per_token=per_token,
        per_longest=per_longest,
        parts=tuple(
            median(values) for values in zip(*(each.step.spent.parts for each in full), strict=True)
        )
        or Medians().parts,
    )
    return found._replace(skew=typical([found.grown(each.step) for each in ordinary]) or 0.0)


def pace(full: Sequence[Timed], usual: Medians = AT_ANY_CONTEXT) -> Pace | None:
    """Of the ordinary ones among full decode steps, as if their contexts were those of `usual`;
    None unless all were timed.
    """
    ordinary = [each.step for each in full if each.beside is Beside.NOTHING]
    device = typical(
        [
            step.device_us / 1e3 - usual.grown(step)
            for step in ordinary
            if step.device_us is not None
        ]
    )
    gap = typical([step.gap_us / 1e3 for step in ordinary if step.gap_us is not None])
    return (
        Pace(device, gap)
        if device is not None and gap is not None and timed_on_device(full)
        else None
    )


def timed_on_device(full: Sequence[Timed]) -> bool:
    """Whether the device's own time of each step is known."""
    return all(each.step.device_us is not None for each in full)


def _sorts(full: Sequence[Timed]) -> dict[Beside, Sort]:
    found = {beside: [each.ms for each in full if each.beside is beside] for beside in Beside}
    return {
        beside: Sort(ms, len(values) / len(full))
        for beside, values in found.items()
        if (ms := typical(values)) is not None
    }


def _prefills(steps: Sequence[Timed]) -> dict[int, float]:
    """Medians by size; one for all, as if of the smallest, where no size has ENOUGH."""
    times: dict[int, list[float]] = {}
    for each in steps:
        times.setdefault(1 << (each.step.rows - 1).bit_length(), []).append(each.ms)
    enough = {size: values for size, values in times.items() if len(values) >= ENOUGH} or {
        1: [each.ms for each in steps]
    }
    return {
        size: ms for size, values in sorted(enough.items()) if (ms := typical(values)) is not None
    }


def begun(log: StepLog, streams: int) -> list[Timed]:
    """A run's steps without its first ones: WARM_UP from the first full one on, though never
    more than half of them.
    """
    timed = timed_steps(log)
    first = next((i for i, each in enumerate(timed) if each.step.steady(streams)), 0)
    return timed[min(first + WARM_UP, len(timed) // 2) :]


def typical(values: Sequence[float]) -> float | None:
    """The median over windows of the mean; None without values."""
    size = max(1, min(WINDOW, len(values) // WINDOWS))
    means = [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    return median(means) if means else None


def _slopes(steps: Sequence[Timed]) -> tuple[float, float]:
    """Milliseconds per token of the mean context and of the longest one: least squares, without
    steps that are far off.
    """
    timed = timed_on_device(steps)
    times = [
        each.step.device_us / 1e3 if timed and each.step.device_us is not None else each.ms
        for each in steps
    ]
    middle = median(times) if times else 0.0
    usual = [
        (each.step, ms)
        for each, ms in zip(steps, times, strict=True)
        if abs(ms - middle) <= FAR_OFF * middle
    ]
    if len(usual) < FEWEST:
        return 0.0, 0.0
    table = torch.tensor(
        [[step.context, step.longest, ms] for step, ms in usual], dtype=torch.float64
    )
    table -= table.mean(0)
    # at one stream both columns are the same
    found = torch.linalg.lstsq(table[:, :2], table[:, 2:], driver="gelsd").solution
    return float(found[0]), float(found[1])
