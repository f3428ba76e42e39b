"""The meter: what it counts, from any thread, and what it leaves alone when it is off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from photon_ext.engine import Engine
from photon_ext.observe.meter import WINDOW_S, Meter, MeterSnapshot
from photon_ext.runtime.pipeline import PipelineStats
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.slot import Slot
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.scheduler import Scheduler
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.scripted_device import ScriptedDevice, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [1, 2, 3]
SECOND = 10**9


@contextmanager
def scripted(
    depth: int = 2, finished: bool = True, max_rows: int = 4, meter: bool = True
) -> Iterator[Engine]:
    device = ScriptedDevice(max_rows=max_rows, depth=depth)
    device.finished = finished
    with Engine(
        device,
        lambda step: None,
        vocab_size=VOCAB,
        num_pages=64,
        buckets=(1, 2),
        chunk=8,
        meter=meter,
    ) as engine:
        yield engine


def stopped_by_its_third_token(prompt: list[int]) -> SamplingParams:
    return SamplingParams(max_new_tokens=20, stop_token_ids=(expected_tokens(prompt, 3, VOCAB)[2],))


# --- counters -------------------------------------------------------------------------------------


@DEPTHS
def test_tokens_rows_and_steps_are_those_of_the_requests(depth: int) -> None:
    with scripted(depth) as engine:
        outputs = engine.generate([[5], [1, 2, 3], [9, 9]], SamplingParams(max_new_tokens=6))
        now = engine.meter.snapshot()
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens == now.tokens == now.committed_rows == 18
    assert (now.steps, now.decode_steps) == (6, 5)
    assert (now.zombie_rows, now.zombie_steps, now.zombie_share) == (0, 0, 0.0)
    assert (now.device, now.depth, now.rows_max) == ("cpu", depth, 4)
    assert now.rows_per_step == 3.0
    assert engine.stats().tokens == tokens


@DEPTHS
def test_one_stream_pays_a_step_of_nothing_but_zombies_at_depth_2(depth: int) -> None:
    """The cost model's premise: at depth 2 one wasted step per request, at depth 1 none."""
    with scripted(depth, max_rows=1) as engine:
        prompts = [[5], [1, 2, 3], [9, 9], [4]]
        engine.generate(prompts, [stopped_by_its_third_token(prompt) for prompt in prompts])
        engine.close()  # waits for the zombies
        now = engine.meter.snapshot()
    wasted = 4 if depth == 2 else 0
    assert (now.zombie_rows, now.zombie_steps) == (wasted, wasted)
    assert now.tokens == 12
    assert now.steps == now.committed_rows == 12 + wasted
    assert now.zombie_share == wasted / now.committed_rows


def test_a_zombie_beside_a_running_row_costs_no_step() -> None:
    with scripted() as engine:
        engine.generate(
            [[5], [1, 2, 3]], [stopped_by_its_third_token([5]), SamplingParams(max_new_tokens=8)]
        )
        engine.close()
        now = engine.meter.snapshot()
    assert (now.zombie_rows, now.zombie_steps, now.steps) == (1, 0, 8)


# --- who waits for whom ---------------------------------------------------------------------------


def test_at_depth_1_every_step_but_the_first_finds_the_device_idle() -> None:
    with scripted(depth=1, finished=False) as engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=7))
        now = engine.meter.snapshot()
    assert (now.steps, now.device_waits, now.host_waits) == (7, 6, 7)
    assert now.host_wait_s > 0


@pytest.mark.parametrize("finished", [True, False])
def test_at_depth_2_the_events_say_who_waited(finished: bool) -> None:
    with scripted(depth=2, finished=finished) as engine:
        engine.generate([PROMPT], SamplingParams(max_new_tokens=7))
        now = engine.meter.snapshot()
    assert (now.steps, now.device_waits, now.host_waits) == ((7, 6, 0) if finished else (7, 0, 7))


@DEPTHS
def test_an_engine_without_requests_makes_nobody_wait(depth: int) -> None:
    with scripted(depth) as engine:
        for _ in range(3):
            engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
            deadline = time.monotonic() + 10
            while engine.meter.snapshot().rows_held and time.monotonic() < deadline:
                # the turn that takes the row back also finds that there is no work
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
    assert (now.host_waits, now.device_waits, now.host_wait_s) == (0, 0, 0.0)
    assert set(now.host_s.values()) == {0.0}


# --- rates and occupancy --------------------------------------------------------------------------


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = SECOND
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.ns)

    def forward(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def bare_meter() -> tuple[Meter, PipelineStats, Scheduler]:
    stats, scheduler = PipelineStats(), Scheduler(PagePool(10), page_size=4, max_rows=4, max_len=64)
    return Meter(stats, scheduler, 2, "cpu"), stats, scheduler


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
    assert meter.snapshot().steps_per_s == pytest.approx(7), (
        "a new burst is not diluted by the pause before it"
    )


class Running(PipelineStats):
    """Of a loop that launches a decode step whenever one of its counters has been read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> object:
        value = object.__getattribute__(self, name)
        if name in ("decode_steps", "prefill_steps"):
            self.decode_steps = object.__getattribute__(self, "decode_steps") + 1
        return value


def test_a_loop_that_goes_on_meanwhile_moves_no_counter_back() -> None:
    pool = PagePool(10)
    meter = Meter(
        Running(prefill_steps=3), Scheduler(pool, page_size=4, max_rows=4, max_len=64), 2, "cpu"
    )
    for _ in range(3):
        assert 'steps_total{kind="prefill"} 3.0\n' in meter.prometheus()
    now = meter.snapshot()
    assert now.steps == now.decode_steps + 3


def test_a_loop_that_wakes_meanwhile_moves_no_rate_below_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    wakes = []

    class Waking(PipelineStats):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            value = object.__getattribute__(self, name)
            if name == "prefill_steps" and wakes:
                wakes.pop()
                self.decode_steps += 1
                meter.turn()
            return value

    meter = Meter(Waking(), Scheduler(PagePool(10), page_size=4, max_rows=4, max_len=64), 2, "cpu")
    clock.forward(2 * WINDOW_S)
    wakes.append(True)
    now = meter.snapshot()
    assert (now.window_s, now.steps_per_s, now.tokens_per_s) == (2 * WINDOW_S, 0, 0)


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
    assert (now.pages_held, now.pages_free) == (4, 6)


def test_samples_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter, _, _ = bare_meter()
    for _ in range(10_000):
        clock.forward(1)
        meter.turn()
    assert len(meter._samples) <= 32


def test_gaps_are_summed_and_the_latest_ones_ranked() -> None:
    meter, stats, _ = bare_meter()
    assert (meter.snapshot().step_gap_us, meter.snapshot().step_gap_p99_us) == (None, None)
    stats.gaps_us.extend(float(us) for us in range(1, 102))
    stats.gap_count, stats.gap_sum_us = 5000, 2e6
    now = meter.snapshot()
    assert (now.step_gap_us, now.step_gap_p99_us, now.gap_count, now.gap_s) == (
        51.0,
        100.0,
        5000,
        2.0,
    )


def test_occupancy_is_that_of_the_pool_and_the_rows() -> None:
    meter, _, scheduler = bare_meter()
    pages = scheduler.pool.allocate(4)
    assert pages is not None
    now = meter.snapshot()
    assert (now.pages_held, now.pages_free, now.page_occupancy) == (4, 6, 0.4)
    assert (now.rows_held, now.rows_max, now.row_occupancy) == (0, 4, 0.0)


def test_host_times_are_by_phase_and_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter, stats, _ = bare_meter()
    meter.turn()
    meter.clock.enter(Phase.LAUNCH)
    clock.forward(0.002)
    meter.clock.enter(None)
    stats.decode_steps = 4
    now = meter.snapshot()
    assert now.host_s["launch"] == 0.002
    assert now.host_us["launch"] == pytest.approx(500)
    assert now.host_us["commit"] == 0


# --- other threads --------------------------------------------------------------------------------


def test_readers_on_other_threads_see_counts_that_fit_together_and_only_grow() -> None:
    seen: list[list[MeterSnapshot]] = [[], []]
    stop = threading.Event()

    def read(into: list[MeterSnapshot]) -> None:
        while not stop.is_set():
            into.append(engine.meter.snapshot())
            engine.meter.prometheus()

    with scripted() as engine:
        readers = [threading.Thread(target=read, args=(into,)) for into in seen]
        for reader in readers:
            reader.start()
        for _ in range(20):
            engine.generate([[i] for i in range(8)], SamplingParams(max_new_tokens=30))
        stop.set()
        for reader in readers:
            reader.join()
        assert engine.meter.snapshot().tokens == 20 * 8 * 30
    for snapshots in seen:
        assert len(snapshots) > 20
        for before, after in pairwise(snapshots):
            for name in (
                "steps",
                "tokens",
                "committed_rows",
                "zombie_rows",
                "host_waits",
                "device_waits",
            ):
                assert getattr(before, name) <= getattr(after, name)
        for now in snapshots:
            assert now.zombie_rows <= now.committed_rows
            assert now.zombie_steps <= now.steps
            assert now.decode_steps <= now.steps
            assert now.tokens_per_s >= 0
