"""The meter: what an engine is doing, from counters and events that the loop has anyway.

Always on. A step costs it two event queries, a few clock readings and some additions; nothing
waits, and nothing grows. Rates are the reader's work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from photon_ext.observe.request_meter import Counts, RequestMeter
from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase

if TYPE_CHECKING:
    from photon_ext.runtime.pipeline import PipelineStats
    from photon_ext.scheduling.scheduler import Scheduler
    from photon_ext.scheduling.step_times import StepTimes

WINDOW_S = 5.0  # what rates are taken over
SAMPLE_S = 0.25
TURN = (Phase.ADMIT, Phase.PLAN, Phase.LAUNCH, Phase.COMMIT, Phase.FINALIZE, Phase.DELIVER)


@dataclass(frozen=True)
class MeterSnapshot:
    """A moment of an engine.

    Counters run from the engine's start; rates are over the last `window_s` seconds.

    Attributes:
        device, depth: where it runs, and how many steps may be in flight.
        uptime_s: seconds since the engine was made.
        steps: steps launched. decode_steps: of them, decode steps.
        quiet_steps: those that sent no byte to the device.
        split_steps: those that were sampled late, because a row waits for a mask of the host.
        tokens: tokens committed, with `exact` those that a preempted request repeats again.
        committed_rows: rows of committed steps.
        zombie_rows: of them, those whose sequence had already ended.
        zombie_steps: committed steps that held nothing but zombies.
        host_waits: commits that waited for the device before a slot was free again. That is as it
            should be: the device is the bottleneck.
        host_wait_s: the seconds that all commits waited.
        device_waits: launches that found the device out of work while there was some: each is a
            bubble. At depth 1 every step is.
        step_gap_us, step_gap_p99_us: how long the device idled before each of the latest steps,
            median and 99th percentile, microseconds; None unless the engine keeps timing.
        step_us: what steps like the latest one that was timed take as a rule, microseconds
            (scheduling.step_times); None before the first.
        gap_count, gap_s: step gaps measured, and their sum in seconds; 0 without timing.
        host_s: seconds of host time by part of the loop's turn: "admit", "plan" (where the loop
            plans; else it is part of launch), "launch", "commit" (with host_wait_s), "finalize"
            (with its masks), "deliver". What the loop sleeps without work is in none.
        live, waiting: requests without a final event; of them, those without a row.
        timeouts, refusals: requests that their deadline ended, and that a full queue refused.
        rows_held, rows_max: rows in use, zombies included, of how many.
        pages_held, pages_cached, pages_free: the KV pages: those of rows, those that nobody holds
            and that a prompt may find its beginning in, those that hold nothing.
        device_constraints, host_constraints: requests that got a row with a constraint, by where it
            is kept.
        automata, automata_held, automata_held_bytes: constraints that lie on the device; of them,
            those of rows, and their bytes.
        prompt_tokens: prompt tokens of admitted requests, those of preempted ones again.
        prefix_hit_tokens: of them, those found in cached pages.
        preemptions: requests that had to leave their rows for others' pages, to go on later.
        window_s: seconds that the rates are over, at most WINDOW_S while the engine works.
        steps_per_s, tokens_per_s: in the window.
        rows_per_step: mean batch of the window's steps, zombies included; 0 without any.
        requests_ended: how many requests have ended, by why (see Output).
        request_histograms: how long they took, by what was counted (see request_meter.BOUNDS).
    """

    device: str
    depth: int
    uptime_s: float
    steps: int
    decode_steps: int
    quiet_steps: int
    split_steps: int
    tokens: int
    committed_rows: int
    zombie_rows: int
    zombie_steps: int
    host_waits: int
    host_wait_s: float
    device_waits: int
    step_gap_us: float | None
    step_gap_p99_us: float | None
    step_us: float | None
    gap_count: int
    gap_s: float
    host_s: dict[str, float]
    live: int
    waiting: int
    timeouts: int
    refusals: int
    rows_held: int
    rows_max: int
    pages_held: int
    pages_cached: int
    pages_free: int
    device_constraints: int
    host_constraints: int
    automata: int
    automata_held: int
    automata_held_bytes: int
    prompt_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    window_s: float
    steps_per_s: float
    tokens_per_s: float
    rows_per_step: float
    requests_ended: dict[str, int] = field(default_factory=dict)
    request_histograms: dict[str, Counts] = field(default_factory=dict)

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
    def pages(self) -> int:
        """KV pages in all."""
        return self.pages_held + self.pages_cached + self.pages_free

    @property
    def page_occupancy(self) -> float:
        """Share of KV pages in use now, 0..1."""
        return self.pages_held / max(self.pages, 1)


class PhaseClock:
    """Host time per phase of TURN: one clock reading per change, and a look for an observer."""

    def __init__(self) -> None:
        self._ns: defaultdict[Phase, int] = defaultdict(int)
        self._phase: Phase | None = None
        self.last_ns = 0  # the latest reading, of time.perf_counter_ns

    def enter(self, phase: Phase | None) -> None:
        """`phase` begins, and the one before it ends; None: the turn is over."""
        now = time.perf_counter_ns()
        if (ended := self._phase) is not None:
            self._ns[ended] += now - self.last_ns
        self._phase, self.last_ns = phase, now
        if probe.active is not None:
            probe.turn(phase)

    def seconds(self) -> dict[str, float]:
        """Seconds since the engine was made, by phase that the loop has entered.

        May be called from any thread.
        """
        ns = self._ns.copy()
        return {phase.value: ns[phase] / 1e9 for phase in TURN if phase in ns}


class StoppedClock(PhaseClock):
    """Measures nothing; it only tells whoever observes."""

    def enter(self, phase: Phase | None) -> None:
        """See PhaseClock.enter."""
        probe.turn(phase)


class _Sample(NamedTuple):
    """Counters at one time, nanoseconds of `time.perf_counter_ns`."""

    at_ns: int
    steps: int
    tokens: int
    rows: int


class Meter:
    """Reads one engine.

    `snapshot` and `prometheus` may be called from any thread, also after the engine has ended;
    `turn` is the loop's.

    Args:
        pipeline: the pipeline's counters.
        scheduler: who holds rows and pages.
        times: what steps take. Gaps and rates are others than these: a gap lies between two steps,
            and a rate counts the time without work, too.
        depth, device: for the snapshot.
        enabled: False keeps no host times and no rates: for measuring what the meter costs.
    """

    def __init__(
        self,
        pipeline: PipelineStats,
        scheduler: Scheduler,
        times: StepTimes,
        depth: int,
        device: str,
        enabled: bool = True,
    ) -> None:
        self.clock = PhaseClock() if enabled else StoppedClock()
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._times = times
        self._depth = depth
        self._device = device
        self._begin_ns = time.perf_counter_ns()
        first = _Sample(self._begin_ns, 0, 0, 0)
        self._samples = deque([first], maxlen=1 + round(WINDOW_S / SAMPLE_S))
        self._next_ns = self._begin_ns if enabled else 1 << 63
        self.requests = RequestMeter()

    def turn(self) -> None:
        """A turn of the loop begins, with admission; now and then keeps a sample of counters."""
        clock = self.clock
        clock.enter(Phase.ADMIT)
        if clock.last_ns >= self._next_ns:
            self._next_ns = clock.last_ns + round(SAMPLE_S * 1e9)
            stats = self._pipeline
            sample = _Sample(clock.last_ns, stats.steps, stats.tokens, stats.committed_rows)
            self._samples.append(sample)

    def snapshot(self) -> MeterSnapshot:
        """What the engine is doing now."""
        stats, scheduler, pool = self._pipeline, self._scheduler, self._scheduler.pool
        # The loop may go on meanwhile. Samples first: the counters then are at least what any of
        # them says. Parts before wholes, and each once: what is told of them fits together.
        samples = self._samples.copy()
        zombie_steps, zombie_rows = stats.zombie_steps, stats.zombie_rows
        gap_s, gap_count, gaps = stats.gap_sum_us / 1e6, stats.gap_count, stats.gaps_us.copy()
        quiet_steps, split_steps = stats.quiet_steps, stats.split_steps
        automata = scheduler.automata
        held, cached = pool.held, pool.cached
        requests = scheduler.stats
        hit_tokens, prompt_tokens = requests.prefix_hit_tokens, requests.prompt_tokens
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
            split_steps=split_steps,
            tokens=tokens,
            committed_rows=rows,
            zombie_rows=zombie_rows,
            zombie_steps=zombie_steps,
            host_waits=stats.host_waits,
            host_wait_s=stats.host_wait_ns / 1e9,
            device_waits=stats.device_waits,
            step_gap_us=statistics.median(gaps) if gaps else None,
            step_gap_p99_us=percentile(gaps, 0.99) if gaps else None,
            step_us=self._times.latest_us,
            gap_count=gap_count,
            gap_s=gap_s,
            host_s=self.clock.seconds(),
            live=len(scheduler.registry),
            waiting=scheduler.waiting_count,
            timeouts=requests.timeouts,
            refusals=requests.refusals,
            rows_held=scheduler.rows_held,
            rows_max=scheduler.max_rows,
            pages_held=held,
            pages_cached=cached,
            pages_free=pool.num_pages - held - cached,
            device_constraints=requests.device_constraints,
            host_constraints=requests.host_constraints,
            automata=automata.resident,
            automata_held=automata.held,
            automata_held_bytes=automata.held_bytes,
            prompt_tokens=prompt_tokens,
            prefix_hit_tokens=hit_tokens,
            preemptions=requests.preemptions,
            window_s=seconds,
            steps_per_s=in_window / seconds,
            tokens_per_s=(tokens - since.tokens) / seconds,
            rows_per_step=(rows - since.rows) / in_window if in_window else 0.0,
            requests_ended=self.requests.ends(),
            request_histograms=self.requests.histograms(),
        )

    def gaps_us(self, since: int = 0) -> list[float]:
        """The step gaps measured after the first `since` (a snapshot's `gap_count`), microseconds;
        of more than 4096 the latest 4096."""
        count = self._pipeline.gap_count - since  # first: as many are there, or more
        gaps = self._pipeline.gaps_us.copy()
        return [*gaps][max(len(gaps) - count, 0) :]

    def prometheus(self) -> str:
        """The snapshot in Prometheus' text format, version 0.0.4, to be served as it is.

        Raises ConfigError where prometheus-client is not installed (extra `engine`). The names,
        and what they mean, stand in photon_ext.observe.prometheus.
        """
        from photon_ext.observe.prometheus import exposition

        return exposition(self.snapshot())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` (one at least) that `share` (0..1) of them do not exceed: the
    nearest rank."""
    rank = math.ceil(share * len(values) - 1e-9)  # 0.07 x 100 is a little more than 7
    return sorted(values)[max(rank, 1) - 1]


def _window_start(samples: Sequence[_Sample], now: int) -> _Sample:
    """The oldest sample within the window; the latest one where the engine idled for longer."""
    recent = (sample for sample in samples if now - sample.at_ns <= WINDOW_S * 1e9)
    return next(recent, samples[-1])
