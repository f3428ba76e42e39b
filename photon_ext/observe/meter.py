"""The meter: what an engine is doing, from counters and events that the loop has anyway. Always on.

A step costs it two event queries, a few clock readings and some additions; nothing waits, and
nothing grows. Rates are the reader's work.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from photon_ext.observe.numbers import percentile
from photon_ext.observe.phase_clock import PhaseClock, StoppedClock
from photon_ext.observe.prometheus import exposition
from photon_ext.runtime.probe import Phase

if TYPE_CHECKING:
    from photon_ext.runtime.pipeline import PipelineStats
    from photon_ext.scheduling.scheduler import Scheduler

WINDOW_S = 5.0  # what rates are taken over
SAMPLE_S = 0.25


@dataclass(frozen=True)
class MeterSnapshot:
    """A moment of an engine. Counters run from the engine's start; rates are over the last
    `window_s` seconds.

    Attributes:
        device, depth: where it runs, and how many steps may be in flight.
        uptime_s: seconds since the engine was made.
        steps: steps launched. decode_steps: of them, decode steps. quiet_steps: those that sent no
            byte to the device.
        tokens: tokens committed.
        committed_rows: rows of committed steps. zombie_rows: of them, those whose sequence had
            already ended.
        zombie_steps: committed steps that held nothing but zombies.
        host_waits, host_wait_s: commits that had to wait for the device before a slot was free
            again, and the seconds all commits waited. That is as it should be: the device is the
            bottleneck.
        device_waits: launches that found the device out of work while there was some: each is a
            bubble. At depth 1 every step is.
        step_gap_us, step_gap_p99_us: of the latest steps, microseconds; None unless the engine
            keeps timing. They say how long the device waited.
        gap_count, gap_s: step gaps measured, and their sum in seconds; 0 unless the engine keeps
            timing.
        host_s: seconds of host time by part of the loop's turn: "plan", "launch", "commit",
            "finalize", "deliver"; `commit` includes host_wait_s. What it sleeps without work is in
            none.
        live, waiting: requests without a final event; of them, those without a row.
        rows_held, rows_max: rows in use, zombies included, of how many.
        pages_held, pages_free: the KV pages.
        window_s: seconds that the rates below are over, at most WINDOW_S while the engine works.
        steps_per_s, tokens_per_s: in the window.
        rows_per_step: mean batch of the window's steps, zombies included; 0 without any.
    """

    device: str
    depth: int
    uptime_s: float
    steps: int
    decode_steps: int
    quiet_steps: int
    tokens: int
    committed_rows: int
    zombie_rows: int
    zombie_steps: int
    host_waits: int
    host_wait_s: float
    device_waits: int
    step_gap_us: float | None
    step_gap_p99_us: float | None
    gap_count: int
    gap_s: float
    host_s: dict[str, float]
    live: int
    waiting: int
    rows_held: int
    rows_max: int
    pages_held: int
    pages_free: int
    window_s: float
    steps_per_s: float
    tokens_per_s: float
    rows_per_step: float

    @property
    def host_us(self) -> dict[str, float]:
        """Microseconds of host time per step, by phase."""
        return {phase: seconds * 1e6 / max(self.steps, 1) for phase, seconds in self.host_s.items()}

    @property
    def zombie_share(self) -> float:
        """Share of committed rows that were zombies, 0..1."""
        return self.zombie_rows / max(self.committed_rows, 1)

    @property
    def row_occupancy(self) -> float:
        """Share of rows in use now, 0..1."""
        return self.rows_held / self.rows_max

    @property
    def page_occupancy(self) -> float:
        """Share of KV pages in use now, 0..1."""
        return self.pages_held / max(self.pages_held + self.pages_free, 1)


class _Sample(NamedTuple):
    """Counters at one time, nanoseconds of `time.perf_counter_ns`."""

    at_ns: int
    steps: int
    tokens: int
    rows: int


class Meter:
    """Reads one engine. `snapshot` and `prometheus` may be called from any thread, also after the
    engine has ended; `turn` is the loop's.

    Args:
        pipeline: the pipeline's counters.
        scheduler: who holds rows and pages.
        depth, device: for the snapshot.
        enabled: False keeps no host times and no rates: for measuring what the meter costs.
    """

    def __init__(
        self,
        pipeline: PipelineStats,
        scheduler: Scheduler,
        depth: int,
        device: str,
        enabled: bool = True,
    ) -> None:
        self.clock = PhaseClock() if enabled else StoppedClock()
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._depth = depth
        self._device = device
        self._begin_ns = time.perf_counter_ns()
        self._samples = deque(
            [_Sample(self._begin_ns, 0, 0, 0)], maxlen=1 + round(WINDOW_S / SAMPLE_S)
        )
        self._next_ns = self._begin_ns if enabled else 1 << 63

    def turn(self) -> None:
        """A turn of the loop begins, with its planning; now and then keeps a sample of the
        counters.
        """
        self.clock.enter(Phase.PLAN)
        now = self.clock.last_ns
        if now >= self._next_ns:
            self._next_ns = now + round(SAMPLE_S * 1e9)
            self._samples.append(_Sample(now, *self._counts()))

    def snapshot(self) -> MeterSnapshot:
        """What the engine is doing now."""
        stats, scheduler, pool = self._pipeline, self._scheduler, self._scheduler.pool
        # before the counters, which so are at least what any sample says
        samples = self._samples.copy()
        # parts before wholes, which the loop may be adding to
        zombie_steps, zombie_rows = stats.zombie_steps, stats.zombie_rows
        gap_s, gap_count, gaps = stats.gap_sum_us / 1e6, stats.gap_count, stats.gaps_us.copy()
        quiet_steps, held = stats.quiet_steps, pool.held
        # each once: what is told of them fits together
        decode_steps, prefill_steps = stats.decode_steps, stats.prefill_steps
        now = time.perf_counter_ns()
        steps, tokens, rows = decode_steps + prefill_steps, stats.tokens, stats.committed_rows
        since = _window_start(samples, now)
        seconds = max((now - since.at_ns) / 1e9, 1e-9)
        in_window = steps - since.steps
        return MeterSnapshot(
            device=self._device,
            depth=self._depth,
            uptime_s=(now - self._begin_ns) / 1e9,
            steps=steps,
            decode_steps=decode_steps,
            quiet_steps=quiet_steps,
            tokens=tokens,
            committed_rows=rows,
            zombie_rows=zombie_rows,
            zombie_steps=zombie_steps,
            host_waits=stats.host_waits,
            host_wait_s=stats.host_wait_ns / 1e9,
            device_waits=stats.device_waits,
            step_gap_us=statistics.median(gaps) if gaps else None,
            step_gap_p99_us=percentile(gaps, 0.99) if gaps else None,
            gap_count=gap_count,
            gap_s=gap_s,
            host_s=self.clock.seconds(),
            live=len(scheduler.live),
            waiting=scheduler.waiting,
            rows_held=scheduler.rows_held,
            rows_max=scheduler.max_rows,
            pages_held=held,
            pages_free=pool.num_pages - held,
            window_s=seconds,
            steps_per_s=in_window / seconds,
            tokens_per_s=(tokens - since.tokens) / seconds,
            rows_per_step=(rows - since.rows) / in_window if in_window else 0.0,
        )

    def prometheus(self) -> str:
        """The snapshot in Prometheus' text format, version 0.0.4, to be served as it is; see
        `exposition` for the names.
        """
        return exposition(self.snapshot())

    def _counts(self) -> tuple[int, int, int]:
        return self._pipeline.steps, self._pipeline.tokens, self._pipeline.committed_rows


def _window_start(samples: Sequence[_Sample], now: int) -> _Sample:
    """The oldest sample within the window; the latest one where the engine has been idle for
    longer.
    """
    return next((sample for sample in samples if now - sample.at_ns <= WINDOW_S * 1e9), samples[-1])
