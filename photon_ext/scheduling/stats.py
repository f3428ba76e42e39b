"""Where the host's time goes."""

from __future__ import annotations

import time
from enum import Enum


class Phase(Enum):
    """Parts of one turn of the engine loop; `commit` includes its wait for the device."""

    PLAN = "plan"
    LAUNCH = "launch"
    COMMIT = "commit"
    FINALIZE = "finalize"
    DELIVER = "deliver"


class PhaseClock:
    """Host time per phase: one clock reading per lap, nothing else."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(Phase, 0)
        self._last = 0

    def start(self) -> None:
        """A turn begins; the time since the last lap belongs to no phase."""
        self._last = time.perf_counter_ns()

    def lap(self, phase: Phase) -> None:
        """What happened since the last lap was `phase`."""
        now = time.perf_counter_ns()
        self._ns[phase] += now - self._last
        self._last = now

    @property
    def last_ns(self) -> int:
        """The latest reading, of `time.perf_counter_ns`."""
        return self._last

    def seconds(self) -> dict[str, float]:
        """Seconds since the engine was made, by phase. May be called from any thread."""
        return {phase.value: ns / 1e9 for phase, ns in self._ns.items()}


class StoppedClock(PhaseClock):
    """Measures nothing, at no cost."""

    def start(self) -> None:
        """See PhaseClock.start."""

    def lap(self, phase: Phase) -> None:
        """See PhaseClock.lap."""
