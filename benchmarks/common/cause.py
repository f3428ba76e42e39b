"""Where a run's wall time can differ from what its medians predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from benchmarks.common.step_log import Part


class Cause(Enum):
    """The first five are of steps that the model counts; the others share the full decode steps
    that are not like their median.

    Where the device's own events are known, ORDINARY_DEVICE and ORDINARY_HOST stand for LEVEL and
    add up to it: what ordinary steps took more or less between their events, and all else of them.
    """

    RAMP = "ramp-up and ramp-down: decode steps of a batch that is not full"
    PREFILLS = "prefill steps: another number of them, or of requests in them, than the model has"
    PREFILL = "prefill steps: longer or shorter ones than the median of their size"
    TURNOVER = "steps of zombies alone: more of them, or longer ones, than the model has"
    COUNT = "decode steps: another number of full ones than the model has"
    CONTEXT = "growth of contexts: rows attend to more tokens than where the medians come from"
    TURNING = "decode steps beside a prefill: requests end and are admitted"
    GARBAGE = "garbage collection in Python"
    DEVICE = "long steps of the device, by its own events"
    WAKE_UP = "wake-ups: the host went on late after the device was done"
    WAIT = "long waits: slow steps of the device, or late wake-ups"
    ADMIT = "the host held up while admitting requests"
    LAUNCH = "the host held up while planning and launching"
    DELIVER = "the host held up while delivering tokens"
    COMMIT = "the host held up while committing"
    BETWEEN = "the host held up between two turns of its loop"
    LEVEL = (
        "all steps alike: ordinary ones are slower or faster than in the run of the medians "
        "(clocks, neighbours)"
    )
    ORDINARY_DEVICE = (
        "the device's part of ordinary steps: from their first event on it to their "
        "last (at depth 1 with a graph's launch)"
    )
    ORDINARY_HOST = (
        "the host's part of ordinary steps: what lies between their events on the "
        "device (wake-ups, committing, planning)"
    )


HELD_UP = {
    Part.ADMIT: Cause.ADMIT,
    Part.LAUNCH: Cause.LAUNCH,
    Part.DELIVER: Cause.DELIVER,
    Part.WAIT: Cause.WAIT,
    Part.COMMIT: Cause.COMMIT,
    Part.BETWEEN: Cause.BETWEEN,
}
SUDDEN = (Cause.GARBAGE, Cause.DEVICE, Cause.WAKE_UP, *HELD_UP.values())
"""What happens to single steps."""
LEVELS = (Cause.LEVEL, Cause.ORDINARY_DEVICE, Cause.ORDINARY_HOST)
"""What ordinary steps have in common."""


class Excess(NamedTuple):
    """Milliseconds more than the medians say, and in how many steps."""

    steps: float = 0.0
    ms: float = 0.0


class Tally:
    """Excess by cause; what was never added is 0."""

    def __init__(self) -> None:
        self._found: defaultdict[Cause, Excess] = defaultdict(Excess)

    def add(self, cause: Cause, ms: float, steps: float = 1) -> None:
        """More of one cause."""
        before = self._found[cause]
        self._found[cause] = Excess(before.steps + steps, before.ms + ms)

    def update(self, other: Tally) -> None:
        """All of another tally."""
        for cause, (steps, ms) in other.found.items():
            self.add(cause, ms, steps)

    def of(self, cause: Cause) -> Excess:
        """Of one cause."""
        return self._found.get(cause, Excess())

    @property
    def found(self) -> Mapping[Cause, Excess]:
        """By cause, in the order of Cause."""
        return {cause: self._found[cause] for cause in Cause if cause in self._found}

    @property
    def total_ms(self) -> float:
        """Over all causes."""
        return sum(each.ms for each in self._found.values())
