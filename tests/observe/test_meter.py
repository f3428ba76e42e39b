"""The meter: what it counts, from any thread, and what it leaves alone when it is off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from photon_ext.engine import Engine
from photon_ext.observe.meter import WINDOW_S, Meter, MeterSnapshot, percentile
from photon_ext.runtime.pipeline import PipelineStats
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.slot import Slot
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import PagePool, Pager, StepTimes
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.step_times import StepLoad
from photon_ext.testing import StubDevice
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import WatchedDevice, engine_of, engine_on, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [1, 2, 3]
SECOND = 10**9


@contextmanager
def scripted(
    depth: int = 2, finished: bool = True, max_rows: int = 4, meter: bool = True
) -> Iterator[Engine]:
    device = WatchedDevice(max_rows=max_rows, depth=depth)
    device.finished = finished
    with engine_on(device, meter=meter) as engine:
        yield engine


def stopped_by_its_third_token(prompt: list[int]) -> SamplingParams:
    stop = expected_tokens(prompt, 3, VOCAB)[2]
    return SamplingParams(max_new_tokens=20, stop_token_ids=(stop,))


# --- counters ------------------------------------------------------------------------------------


@DEPTHS
def test_tokens_rows_and_steps_are_those_of_the_requests(depth: int) -> None:
    with scripted(depth) as engine:
        outputs = engine.generate([[5], [1, 2, 3], [9, 9]], SamplingParams(max_new_tokens=6))
        now = engine.meter.snapshot()
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens == now.tokens == now.committed_rows == engine.stats().tokens == 18
    assert (now.steps, now.decode_steps, now.rows_per_step) == (6, 5, 3.0)
    assert (now.zombie_rows, now.zombie_steps, now.zombie_share) == (0, 0, 0.0)
    assert (now.device, now.depth, now.rows_max) == ("cpu", depth, 4)
    assert set(now.host_s) == {"admit", "plan", "launch", "commit", "finalize", "deliver"}


@DEPTHS
def test_one_stream_pays_a_step_of_nothing_but_zombies_at_depth_2(depth: int) -> None:
    """The cost model's premise: at depth 2 one wasted step per request, at depth 1 none."""
    with scripted(depth, max_rows=1) as engine:
        prompts = [[5], [1, 2, 3], [9, 9], [4]]
        engine.generate(prompts, [stopped_by_its_third_token(prompt) for prompt in prompts])
        engine.close()  # waits for the zombies
        now = engine.meter.snapshot()
    wasted = 4 if depth == 2 else 0
    assert (now.tokens, now.zombie_rows, now.zombie_steps) == (12, wasted, wasted)
    assert now.steps == now.committed_rows == 12 + wasted
    assert now.zombie_share == wasted / now.committed_rows


def test_a_zombie_beside_a_running_row_costs_no_step() -> None:
    with scripted() as engine:
        both = [stopped_by_its_third_token([5]), SamplingParams(max_new_tokens=8)]
        engine.generate([[5], [1, 2, 3]], both)
        engine.close()
        now = engine.meter.snapshot()
    assert (now.zombie_rows, now.zombie_steps, now.steps) == (1, 0, 8)


# --- who waits for whom --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "finished", "waits"),
    [(1, False, (7, 6, 7)), (2, True, (7, 6, 0)), (2, False, (7, 0, 7))],
)
def test_the_events_say_who_waited(depth: int, finished: bool, waits: tuple[int, int, int]) -> None:
    """At depth 1 every step but the first finds the device idle."""
    with scripted(depth, finished) as engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=7))
        now = engine.meter.snapshot()
    assert (now.steps, now.device_waits, now.host_waits) == waits
    assert now.host_wait_s > 0


@DEPTHS
def test_an_engine_without_requests_makes_nobody_wait(depth: int) -> None:
    with scripted(depth) as engine:
        for _ in range(3):
            engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
            deadline = time.monotonic() + 60
            # the turn that takes the row back also finds that there is no work
            while engine.meter.snapshot().rows_held and time.monotonic() < deadline:
                time.sleep(0.001)
        assert engine.meter.snapshot().device_waits == 0


def test_an_error_of_the_device_is_left_to_the_wait() -> None:
    class Broken:
        def done(self) -> bool:
            raise RuntimeError("an illegal address")

        wait = done

    slot = object.__new__(Slot)
    slot._native = Broken()  # type: ignore[assignment]
    assert slot.done()
    with pytest.raises(RuntimeError, match="an illegal address"):
        slot.wait(1)


def test_without_the_meter_only_plain_counts_are_left() -> None:
    with scripted(depth=1, meter=False) as engine:
        (output,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=7))
        now = engine.meter.snapshot()
    assert list(output.token_ids) == expected_tokens(PROMPT, 7, VOCAB)
    assert (now.steps, now.tokens) == (7, 7)
    assert (now.host_waits, now.device_waits, now.host_wait_s, now.host_s) == (0, 0, 0.0, {})


# --- rates and occupancy -------------------------------------------------------------------------


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = SECOND
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.ns)

    def forward(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def bare_meter(stats: PipelineStats | None = None) -> tuple[Meter, PipelineStats, Scheduler]:
    stats = stats or PipelineStats()
    scheduler = Scheduler(Pager(PagePool(10), 4), max_rows=4, max_len=64)
    return Meter(stats, scheduler, StepTimes(), 2, "cpu"), stats, scheduler


def test_rates_are_over_the_last_seconds_and_fall_when_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    meter, stats, _ = bare_meter()
    for _ in range(1000):  # 10 s of 100 steps a second, 3 rows each
        clock.forward(0.01)
        meter.turn()
        stats.decode_steps += 1
        stats.tokens += 3
        stats.committed_rows += 3
    now = meter.snapshot()
    assert now.window_s == pytest.approx(WINDOW_S, abs=0.3)
    assert now.steps_per_s == pytest.approx(100, rel=0.01)
    assert now.tokens_per_s == pytest.approx(300, rel=0.01)
    assert now.rows_per_step == pytest.approx(3)
    clock.forward(1000)
    idle = meter.snapshot()
    assert idle.steps_per_s < 0.1
    assert idle.tokens == 3000
    meter.turn()
    clock.forward(1)
    stats.decode_steps += 7
    burst = meter.snapshot().steps_per_s
    assert burst == pytest.approx(7), "a new burst is not diluted by the pause before it"
    assert len(meter._samples) <= 32, "nothing grows"


class Watched(PipelineStats):
    """Of a loop that goes on whenever one of its counters of steps has been read."""

    __slots__ = ("goes_on",)
    goes_on: Callable[[], None]

    def __getattribute__(self, name: str) -> object:
        value = object.__getattribute__(self, name)
        if name in ("decode_steps", "prefill_steps"):
            object.__getattribute__(self, "goes_on")()
        return value


def test_a_loop_that_goes_on_meanwhile_moves_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stats = Clock(monkeypatch), Watched(prefill_steps=3)
    stats.goes_on = lambda: None
    meter, _, _ = bare_meter(stats)

    def go_on() -> None:
        stats.goes_on = lambda: None
        stats.decode_steps += 1
        meter.turn()
        stats.goes_on = go_on

    clock.forward(2 * WINDOW_S)
    stats.goes_on = go_on
    for _ in range(3):
        now = meter.snapshot()
        assert now.steps - now.decode_steps == 3
        assert min(now.steps_per_s, now.tokens_per_s) >= 0


def test_pages_of_a_snapshot_are_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some are given back while it is taken."""
    meter, _, scheduler = bare_meter()
    pages = scheduler.pool.allocate(4)
    assert pages is not None
    held = PagePool.held

    def giving_back(pool: PagePool) -> int:
        count = held.__get__(pool)
        if count:
            pool.release(pages)
        return int(count)

    monkeypatch.setattr(PagePool, "held", property(giving_back))
    now = meter.snapshot()
    assert (now.pages_held, now.pages_free, now.page_occupancy) == (4, 6, 0.4)
    assert (now.rows_held, now.rows_max, now.row_occupancy) == (0, 4, 0.0)


def test_gaps_are_summed_and_the_latest_ones_ranked() -> None:
    meter, stats, _ = bare_meter()
    now = meter.snapshot()
    assert (now.step_gap_us, now.step_gap_p99_us, now.step_us) == (None, None, None)
    stats.gaps_us.extend(float(us) for us in range(1, 102))
    stats.gap_count, stats.gap_sum_us = 5000, 2e6
    meter._times.add(StepLoad(8), 2000.0)
    meter._times.add(StepLoad(8), 2800.0)
    now = meter.snapshot()
    assert (now.step_gap_us, now.step_gap_p99_us, now.step_us) == (51.0, 100.0, 2100.0)
    assert (now.gap_count, now.gap_s) == (5000, 2.0)
    assert meter.gaps_us(since=4998) == [100.0, 101.0]
    assert meter.gaps_us(since=5000) == []
    assert len(meter.gaps_us()) == 101


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(1, 0.99, 1), (2, 0.5, 1), (99, 0.99, 99), (101, 0.99, 100), (100, 0.07, 7), (5, 0, 1)],
)
def test_a_percentile_is_the_nearest_rank(count: int, share: float, expected: int) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert percentile(values, share) == expected
    assert values[0] == count, "the values are left as they are"


def test_host_times_are_by_phase_and_admission_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter, stats, _ = bare_meter()
    meter.turn()
    for phase, seconds in ((Phase.LAUNCH, 0.001), (None, 0.002), (None, 5.0)):
        clock.forward(seconds)
        meter.clock.enter(phase)
    stats.decode_steps = 4
    now = meter.snapshot()
    assert now.host_s == {"admit": 0.001, "launch": 0.002}
    assert now.host_us["launch"] == pytest.approx(500)
    meter.clock.enter(Phase.PLAN)
    clock.forward(0.25)
    meter.clock.enter(Phase.LAUNCH)
    told = meter.snapshot().host_s
    assert list(told) == ["admit", "plan", "launch"], "in the order of a turn"
    assert told["plan"] == 0.25


# --- other threads -------------------------------------------------------------------------------


def test_readers_on_other_threads_see_counts_that_fit_together_and_only_grow() -> None:
    seen: list[list[MeterSnapshot]] = [[], []]
    stop = threading.Event()

    def read(into: list[MeterSnapshot]) -> None:
        while not stop.is_set():
            into.append(engine.meter.snapshot())

    device = StubDevice(max_rows=4, max_len=64, page_size=4)
    with engine_of(device, lambda step: None, VOCAB, 64) as engine:
        readers = [threading.Thread(target=read, args=(into,)) for into in seen]
        for reader in readers:
            reader.start()
        for _ in range(20):
            engine.generate([[i] for i in range(8)], SamplingParams(max_new_tokens=30))
        stop.set()
        for reader in readers:
            reader.join()
        assert engine.meter.snapshot().tokens == 20 * 8 * 30
    growing = ("steps", "tokens", "committed_rows", "zombie_rows", "host_waits", "device_waits")
    for snapshots in seen:
        assert len(snapshots) > 20
        for before, after in pairwise(snapshots):
            assert all(getattr(before, name) <= getattr(after, name) for name in growing)
        for now in snapshots:
            assert now.zombie_rows <= now.committed_rows
            assert max(now.zombie_steps, now.decode_steps) <= now.steps
            assert now.tokens_per_s >= 0
