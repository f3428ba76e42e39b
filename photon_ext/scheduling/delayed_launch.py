"""Delayed launches: how long the next one may wait, so that who arrives meanwhile is scheduled."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_ext.runtime import Step, StepResult
from photon_ext.scheduling.step_times import StepLoad, StepTimes

LEAST_MARGIN_US = 300.0  # before the running step ends: for late wake-ups, and shorter steps
RELATIVE_MARGIN = 1 / 16  # the same, of the step's time
LEAST_STEP_US = 2000.0  # behind shorter ones a wait gains little, and its jitter costs more
LEAST_DELAY_US = 50.0  # less is not worth a sleep
# What a launch takes, to a bound that one of a hundred exceeds: raised by such a one, and lowered
# by each other.
FIRST_LAUNCH_US, RAISED, LOWERED = 200.0, 1.25, 0.9975


class DelayedLaunch:
    """With two steps in flight whoever arrives waits for both. The device needs the second only
    when the first ends: so its launch is delayed until shortly before, by the least that others of
    its load took, where steps have events. That is rather too short than too long: then a launch is
    earlier than it had to be, where else the device would wait. A step is taken to begin when the
    host commits the one before; where that is late, so is the launch, by one margin at most.

    The margin before the end covers what plan and launch took lately, too: a bound of launches, and
    so no time of a step. Short steps are followed at once, as are those that nothing is known of,
    and those with prompts, whose times differ: in a burst the device waited a millisecond behind
    some of them.
    """

    def __init__(
        self,
        times: StepTimes,
        enabled: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`times`: hears of each commit first. `enabled`: False never delays, as where steps run on
        the cores that the loop needs to wake up in time. `clock`: nanoseconds.
        """
        self._enabled = enabled
        self._clock = clock
        self._times = times
        self._latest: StepLoad | None = None  # of the latest step; None: not to be waited for
        self._begin_ns = 0  # when the latest step began, as far as that can be told
        self._due_ns: int | None = None  # when the next launch was to begin; None: nobody asked
        self._launch_us = FIRST_LAUNCH_US

    def left_s(self) -> float:
        """Seconds for which the launch behind the latest step may wait; ask again then. They are
        few, as the step may end before its time. 0: it is to be launched now.
        """
        known = None if self._latest is None else self._times.known.get(self._latest)
        if known is None or known.least < LEAST_STEP_US:
            return 0.0
        expected = known.least
        now = self._clock()
        self._due_ns = now if self._due_ns is None else min(now, self._due_ns)
        margin = LEAST_MARGIN_US + RELATIVE_MARGIN * expected
        due_ns = self._begin_ns + int(1e3 * (expected - margin - self._launch_us))
        left_us = (due_ns - now) / 1e3
        if left_us < LEAST_DELAY_US:
            return 0.0
        self._due_ns = due_ns
        return min(left_us, margin) / 1e6

    def launched(self, step: Step) -> None:
        """A step was launched."""
        if not self._enabled:
            return
        now = self._clock()
        if self._due_ns is not None:  # a late wake-up is part of what the launch took
            longer = now - self._due_ns > 1e3 * self._launch_us
            self._launch_us *= RAISED if longer else LOWERED
            self._due_ns = None
        timed = step.span is not None and not step.chunks
        self._latest, self._begin_ns = StepLoad.of(step) if timed else None, now

    def committed(self, result: StepResult) -> None:
        """A step was committed: what is in flight behind it runs."""
        if not self._enabled:
            return
        self._begin_ns, self._due_ns = self._clock(), None
        if result.step is None:  # nothing runs: nobody is delayed, and nothing is late
            self._latest = None
