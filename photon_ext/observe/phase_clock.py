"""The host's time by phase of the engine loop."""

from __future__ import annotations

import time

from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase

TURN = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.FINALIZE, Phase.DELIVER)
"""Parts of one turn of the engine loop; `commit` includes its wait for the device, `finalize`
its masks.
"""


class PhaseClock:
    """Host time per phase of TURN: one clock reading per change, and a check whether somebody
    observes.
    """

    def __init__(self) -> None:
        self._ns = dict.fromkeys(TURN, 0)
        self._phase: Phase | None = None
        self._last = 0

    def enter(self, phase: Phase | None) -> None:
        """`phase` begins, and the one before it ends; None: the turn is over."""
        now = time.perf_counter_ns()
        if self._phase is not None:
            self._ns[self._phase] += now - self._last
        self._phase, self._last = phase, now
        probe.turn(phase)

    @property
    def last_ns(self) -> int:
        """The latest reading, of `time.perf_counter_ns`."""
        return self._last

    def seconds(self) -> dict[str, float]:
        """Seconds since the engine was made, by phase. May be called from any thread."""
        return {phase.value: ns / 1e9 for phase, ns in self._ns.items()}


class StoppedClock(PhaseClock):
    """Measures nothing; it only tells whoever observes."""

    def enter(self, phase: Phase | None) -> None:
        """See PhaseClock.enter."""
        probe.turn(phase)
