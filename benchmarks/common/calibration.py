"""Why full decode steps were not as long as their median: each is held against it, and what is left over goes to one cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.common.cause import HELD_UP, SUDDEN, Cause, Tally
from benchmarks.common.steady import Beside, Medians, Timed, begun, medians, timed_steps
from benchmarks.common.step_log import Part, StepLog

LONG = 0.1  # of a step: what differs by less is an ordinary one
COLLECTED = 0.5  # of the excess: garbage collection explains it


@dataclass(frozen=True)
class Calibration:
    """What runs of their own say about an engine while it is steady.

    Attributes:
        usual: their medians.
        habits: milliseconds per full decode step that each cause has in those runs already. What happens often is in the medians, and a
            habit; what happens now and then is in neither.
    """

    usual: Medians
    habits: Mapping[Cause, float]

    @classmethod
    def of(cls, logs: Sequence[StepLog], streams: int) -> Calibration:
        """From runs at one depth."""
        usual = medians(logs, streams)
        return cls(usual, _habits([(log.depth, begun(log, streams)) for log in logs], usual, streams))

    def uneven(self, log: StepLog, streams: int) -> Tally:
        """What the full decode steps of another run took more than their median, by cause."""
        full = [each for each in timed_steps(log) if each.step.steady(streams)]
        tally = _split(full, self.usual, log.depth)
        for cause, ms in self.habits.items():
            tally.add(cause, -len(full) * ms, 0)
        mixed = sum(_median_of(each, self.usual) for each in full) - len(full) * (self.usual.decode or 0.0)
        tally.add(Cause.TURNING, mixed, 0)  # more or fewer of a sort than the medians were made of
        return tally


def _habits(runs: Sequence[tuple[int, Sequence[Timed]]], usual: Medians, streams: int) -> dict[Cause, float]:
    tally, count = Tally(), 0
    for depth, timed in runs:
        full = [each for each in timed if each.step.steady(streams)]
        tally.update(_split(full, usual, depth))
        count += len(full)
    sudden = {cause: tally.of(cause).ms for cause in SUDDEN}
    total = sum(sudden.values())
    if not count or total <= 0:
        return {}
    share = min(1.0, max(0.0, -tally.of(Cause.LEVEL).ms / total))  # ordinary steps lie below the medians by what these contain of the rest
    found = {cause: share * ms / count for cause, ms in sudden.items() if ms}
    return {**found, Cause.LEVEL: -sum(found.values())}


def _median_of(each: Timed, usual: Medians) -> float:
    sort = usual.sorts.get(each.beside)
    return sort.ms if sort is not None else usual.decode or 0.0


def _split(full: Sequence[Timed], usual: Medians, depth: int) -> Tally:
    """The excess of full decode steps, by cause.

    What the middle step of a run has over the medians, all have: that is the run's level. What the middle one of those beside a prefill has
    besides, they have for being there. What a single step differs by from its like is that step's own.
    """
    tally = Tally()
    excess = [each.ms - _median_of(each, usual) for each in full]
    grown = [
        usual.per_token * (each.step.context - usual.context) + usual.per_longest * (each.step.longest - usual.longest) for each in full
    ]
    level = {
        beside: median(over - more for over, more, each in zip(excess, grown, full, strict=True) if each.beside is beside)
        for beside in {each.beside for each in full}
    }
    all_have = level.get(Beside.NOTHING, 0.0)
    before = Cause.LEVEL
    for each, over, more in zip(full, excess, grown, strict=True):
        tally.add(Cause.CONTEXT, more)
        tally.add(Cause.LEVEL, all_have)
        if each.beside is not Beside.NOTHING:
            tally.add(Cause.TURNING, level[each.beside] - all_have)
        own = list(_own(each, over - more - level[each.beside], usual, depth, before))
        for cause, ms in own:
            tally.add(cause, ms, cause in SUDDEN)
        before = own[0][0]
    return tally


def _own(each: Timed, excess: float, usual: Medians, depth: int, before: Cause) -> Iterator[tuple[Cause, float]]:
    """The cause of what one step has over its like; two of them where the device's own time is known."""
    if abs(excess) <= LONG * _median_of(each, usual):
        yield Cause.LEVEL if each.beside is Beside.NOTHING else Cause.TURNING, excess
    elif each.step.spent.collected_ms > COLLECTED * abs(excess):
        yield Cause.GARBAGE, excess
    elif excess < 0 and depth > 1 and before in SUDDEN:
        yield before, excess  # the step before was read late, and the device went on meanwhile
    else:
        sign = 1 if excess > 0 else -1
        more = [sign * (own - normal) for own, normal in zip(each.step.spent.parts, usual.parts, strict=True)]
        cause = HELD_UP[list(Part)[more.index(max(more))]]
        if cause is Cause.WAIT and each.step.device_us is not None and usual.device is not None:
            device = each.step.device_us / 1e3 - usual.device
            yield Cause.WAKE_UP, excess - device
            yield Cause.DEVICE, device
        else:
            yield cause, excess
