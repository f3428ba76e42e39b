"""What the engine counts and times about itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
        host_us: microseconds of host time per step, by phase (Phase).
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
