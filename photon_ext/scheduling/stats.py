"""What the engine counts and times about itself."""

from __future__ import annotations

import time
from dataclasses import dataclass

from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase

TURN = (Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.FINALIZE, Phase.DELIVER)
"""Parts of one turn of the engine loop; `commit` includes its wait for the device, `finalize` its masks."""


class PhaseClock:
    """Host time per phase of TURN: one clock reading per change, and a check whether somebody observes."""

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

    def per_step_us(self, steps: int) -> dict[str, float]:
        """Microseconds per step, by phase."""
        return {phase.value: ns / 1e3 / max(steps, 1) for phase, ns in self._ns.items()}


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes:
        steps: steps launched since the engine was made.
        decode_steps: of them, decode steps.
        zombie_rows: rows of committed steps whose sequence had already ended.
        depth: steps in flight at most.
        device: where it runs.
        step_gap_us: median step gap of the latest steps, microseconds; None unless the engine keeps timing.
        host_us: microseconds of host time per step, by phase (TURN).
        live, waiting: requests without a final event; of them, those without a row.
        pages_free, pages_held: the KV pages.
    """

    steps: int
    decode_steps: int
    zombie_rows: int
    depth: int
    device: str
    step_gap_us: float | None
    host_us: dict[str, float]
    live: int
    waiting: int
    pages_free: int
    pages_held: int
