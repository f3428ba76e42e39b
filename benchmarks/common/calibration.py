"""Why full decode steps were not as long as their median: each is held against it, and what is
left over goes to one cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.common.cause import HELD_UP, LEVELS, SUDDEN, Cause, Tally
from benchmarks.common.steady import (
    Beside,
    Medians,
    Timed,
    begun,
    medians,
    timed_on_device,
    timed_steps,
)
from benchmarks.common.step_log import Part, StepLog

LONG = 0.1  # of a step: what differs by less is an ordinary one
COLLECTED = 0.5  # of the excess: garbage collection explains it


@dataclass(frozen=True)
class Calibration:
    """What runs of their own say about an engine while it is steady.

    Attributes:
        usual: their medians.
        habits: milliseconds per full decode step that each cause has in those runs already. What
            happens often is in the medians, and a habit; what happens now and then is in neither.
    """

    usual: Medians
    habits: Mapping[Cause, float]

    @classmethod
    def of(cls, logs: Sequence[StepLog], streams: int) -> Calibration:
        """From runs at one depth."""
        usual = medians(logs, streams)
        return cls(
            usual, _habits([(log.depth, begun(log, streams)) for log in logs], usual, streams)
        )

    def uneven(self, log: StepLog, streams: int) -> Tally:
        """What the full decode steps of another run took more than their median, by cause."""
        full = [each for each in timed_steps(log) if each.step.steady(streams)]
        tally = _split(full, self.usual, log.depth)
        for cause, ms in self.habits.items():
            tally.add(cause, -len(full) * ms, 0)
        mixed = sum(_median_of(each, self.usual) for each in full) - len(full) * (
            self.usual.decode or 0.0
        )
        tally.add(Cause.TURNING, mixed, 0)  # more or fewer of a sort than the medians were made of
        return tally


def _habits(
    runs: Sequence[tuple[int, Sequence[Timed]]], usual: Medians, streams: int
) -> dict[Cause, float]:
    tally, count = Tally(), 0
    for depth, timed in runs:
        full = [each for each in timed if each.step.steady(streams)]
        tally.update(_split(full, usual, depth))
        count += len(full)
    sudden = {cause: tally.of(cause).ms for cause in SUDDEN}
    total = sum(sudden.values())
    if not count or total <= 0:
        return {}
    below = -sum(tally.of(cause).ms for cause in LEVELS)
    # ordinary steps lie below the medians by what these contain of the rest
    share = min(1.0, max(0.0, below / total))
    found = {cause: share * ms / count for cause, ms in sudden.items() if ms}
    levels = Tally()
    _add_level(
        levels,
        -sum(found.values()),
        None if Cause.LEVEL in tally.found else -found.get(Cause.DEVICE, 0.0),
    )
    return {**found, **{cause: each.ms for cause, each in levels.found.items()}}


def _median_of(each: Timed, usual: Medians) -> float:
    sort = usual.sorts.get(each.beside)
    return sort.ms if sort is not None else usual.decode or 0.0


def _split(full: Sequence[Timed], usual: Medians, depth: int) -> Tally:
    """The excess of full decode steps, by cause.

    What the middle step of a run has over the medians, all have: that is the run's level. What the
    middle one of those beside a prefill has besides, they have for being there. What a single step
    differs by from its like is that step's own. With the device's own times each of these has a
    part that they show.
    """
    tally = Tally()
    grown = [usual.grown(each.step) for each in full]
    excess = _Over(
        full,
        [each.ms - _median_of(each, usual) - more for each, more in zip(full, grown, strict=True)],
    )
    on_device = _over_on_device(full, grown, usual)
    before = Cause.LEVEL
    for i, (each, more) in enumerate(zip(full, grown, strict=True)):
        tally.add(Cause.CONTEXT, more)
        _add_level(tally, excess.all_have, None if on_device is None else on_device.all_have)
        if each.beside is not Beside.NOTHING:
            tally.add(Cause.TURNING, excess.level[each.beside] - excess.all_have)
        device = None if on_device is None else on_device.own(i)
        own = list(_own(each, excess.own(i), device, usual, depth, before))
        for cause, ms in own:
            if cause is Cause.LEVEL:
                _add_level(tally, ms, device, 0)
            else:
                tally.add(cause, ms, cause in SUDDEN)
        before = own[0][0]
    return tally


class _Over:
    """What steps take more than their median, milliseconds: `level` is that of the middle one by
    what is beside it.
    """

    def __init__(self, full: Sequence[Timed], over: Sequence[float]) -> None:
        self._full, self._over = full, over
        besides = {each.beside for each in full}
        self.level = {
            beside: median(ms for each, ms in zip(full, over, strict=True) if each.beside is beside)
            for beside in besides
        }
        self.all_have = self.level.get(Beside.NOTHING, 0.0)

    def own(self, index: int) -> float:
        """What one step has besides its like."""
        return self._over[index] - self.level[self._full[index].beside]


def _over_on_device(full: Sequence[Timed], grown: Sequence[float], usual: Medians) -> _Over | None:
    """By the device's own events; None without them."""
    if usual.pace is None or not timed_on_device(full):
        return None
    times = [(each.step.device_us or 0.0) / 1e3 for each in full]
    return _Over(
        full, [ms - usual.pace.device_ms - more for ms, more in zip(times, grown, strict=True)]
    )


def _add_level(tally: Tally, ms: float, device_ms: float | None, steps: float = 1) -> None:
    """What steps have in common: the device's part of it, where that is known, and the rest."""
    if device_ms is None:
        tally.add(Cause.LEVEL, ms, steps)
    else:
        tally.add(Cause.ORDINARY_DEVICE, device_ms, steps)
        tally.add(Cause.ORDINARY_HOST, ms - device_ms, steps)


def _own(
    each: Timed, excess: float, device: float | None, usual: Medians, depth: int, before: Cause
) -> Iterator[tuple[Cause, float]]:
    """The cause of what one step has over its like; two of them where it is known what it has so
    on the device.
    """
    if abs(excess) <= LONG * _median_of(each, usual):
        yield Cause.LEVEL if each.beside is Beside.NOTHING else Cause.TURNING, excess
    elif each.step.spent.collected_ms > COLLECTED * abs(excess):
        yield Cause.GARBAGE, excess
    elif excess < 0 and depth > 1 and before in SUDDEN:
        yield before, excess  # the step before was read late, and the device went on meanwhile
    else:
        sign = 1 if excess > 0 else -1
        more = [
            sign * (own - normal)
            for own, normal in zip(each.step.spent.parts, usual.parts, strict=True)
        ]
        cause = HELD_UP[list(Part)[more.index(max(more))]]
        if cause is Cause.WAIT and device is not None:
            yield Cause.WAKE_UP, excess - device
            yield Cause.DEVICE, device
        else:
            yield cause, excess
