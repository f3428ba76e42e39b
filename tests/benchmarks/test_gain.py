"""Predicted and observed gains in virtual time, where nothing but the model can be wrong: the real engine, loop and log."""

from __future__ import annotations

import time

import pytest

from benchmarks.common.gain import Cause, Gain, Side, periods
from benchmarks.common.result import BenchmarkError
from benchmarks.common.serving import LONGEST, Load, Medians, Served, medians, serve
from photon_ext.engine import Engine
from photon_ext.observe.cost_model import Periods, StepParts, predict_from_parts
from tests.benchmarks.virtual_device import Costs, VirtualDevice

VOCAB, LENGTH = 997, 40
FAST = Costs()


def run(costs: Costs, streams: int, depth: int, requests: list[int], patch: pytest.MonkeyPatch) -> tuple[Periods, list[Served], Engine]:
    """Medians of one run, and further runs of `requests` per stream each."""
    device = VirtualDevice(costs, streams, depth, max_len=8 + LONGEST * LENGTH)
    patch.setattr(time, "perf_counter_ns", device.now)
    engine = Engine(device, lambda step: None, vocab_size=VOCAB, num_pages=streams * 20, buckets=(1, 8), chunk=512)
    with engine:
        found = periods(medians(serve(engine, load(streams, 8), 1).log, streams))
        return found, [serve(engine, load(streams, each), 1000 + i) for i, each in enumerate(requests)], engine


def load(streams: int, requests: int) -> Load:
    return Load(streams, requests, 8, LENGTH, LONGEST * LENGTH, 1.0)


def gains(costs: Costs, streams: int, requests: list[int], patch: pytest.MonkeyPatch) -> list[Gain]:
    """Depth 1 against depth 2: a gain for each of `requests`."""
    sides = [run(costs, streams, depth, requests, patch)[:2] for depth in (1, 2)]
    made = []
    for i in range(len(requests)):
        block, pipe = (Side(depth, found, [served[i]]) for depth, (found, served) in zip((1, 2), sides, strict=True))
        made.append(Gain(block, pipe, streams))
    return made


def test_periods_are_those_of_the_device_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(FAST, 4, 1, [], monkeypatch)[0] == Periods(decode_ms=2.5, prefill_ms=2.7)
    four = run(FAST, 4, 2, [], monkeypatch)[0]
    assert (four.decode_ms, four.prefill_ms) == (2.0, 2.2)
    one = run(FAST, 1, 2, [], monkeypatch)[0]
    assert (one.decode_ms, one.prefill_ms) == (2.0, 2.7)  # a single stream begins anew with a bubble
    assert one.dead_ms == pytest.approx(0.2, abs=0.11)  # what is left of it after the commit before, and its own commit


@pytest.mark.parametrize(("streams", "requests"), [(1, 30), (8, 30), (16, 30)])
def test_predictions_meet_observations(monkeypatch: pytest.MonkeyPatch, streams: int, requests: int) -> None:
    (gain,) = gains(FAST, streams, [requests], monkeypatch)
    assert gain.tokens_equal
    assert abs(gain.observed - gain.prediction.gain) <= 0.01, gain.explained()
    assert gain.met
    assert 0.15 < gain.prediction.gain <= 0.25
    assert gain.work.tokens_per_request == pytest.approx(LENGTH, rel=0.15)


def test_a_zombie_that_costs_a_whole_forward_is_seen_at_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published case, where only the host knows of stops: the tax is 1 / L, and predicted."""
    (costly,), (cheap,) = (gains(Costs(dead=dead), 1, [30], monkeypatch) for dead in (2.0, 0.1))
    assert costly.met
    assert cheap.met
    assert cheap.observed - costly.observed == pytest.approx(1.25 / LENGTH, rel=0.25)


def test_a_short_run_falls_short_by_its_ramp_down_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published shortfall at 32 streams: host work grows with the batch, so that steps of an emptying batch have less to gain."""
    costs = Costs(decode=3.8, prefill=3.9, launch=0.2, commit=0.0, commit_per_row=0.05)
    enough, short = gains(costs, 32, [60, 1], monkeypatch)
    assert enough.met, enough.explained()
    assert enough.observed_full == pytest.approx(enough.prediction.gain, abs=0.015)
    assert not short.met
    assert short.observed < short.prediction.gain - 0.05
    effects = short.effects()
    assert min(effects, key=lambda cause: effects[cause]) is Cause.RAMP
    assert "by ramp-up and ramp-down" in short.explained()
    assert sum(effects.values()) == pytest.approx(short.observed - short.prediction.gain, abs=0.01)


def test_jitter_that_medians_do_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    block = run(FAST, 8, 1, [30], monkeypatch)
    pipe = run(Costs(jitter=(0.0, 0.0, 0.0, 2.0)), 8, 2, [30], monkeypatch)
    gain = Gain(Side(1, block[0], block[1]), Side(2, pipe[0], pipe[1]), 8)
    assert not gain.met
    assert gain.observed < gain.prediction.gain
    assert "by uneven steps" in gain.explained()


def test_a_device_that_hides_everything_shows_what_the_parts_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    (gain,) = gains(FAST, 8, [20], monkeypatch)
    parts = predict_from_parts(StepParts(1.9, 0.1, 0.5), gain.work)
    assert parts.gain == pytest.approx(gain.observed, abs=0.015)


def test_a_slow_forward_hardly_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    (gain,) = gains(Costs(decode=35.0, prefill=36.0, dead=0.2), 8, [60], monkeypatch)
    assert gain.met
    assert gain.observed < 0.02
    assert "does not pay" in gain.prediction.verdict  # a full batch of short answers: the row-steps lost are more than what is hidden


def test_the_meter_sees_the_bubble_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocking = run(FAST, 4, 1, [4], monkeypatch)
    _, _, pipelined = run(FAST, 4, 2, [4], monkeypatch)
    before, after = blocking.meter.snapshot(), pipelined.meter.snapshot()
    assert before.device_waits >= before.steps - 3  # all but the first of each run
    assert after.device_waits < 0.05 * after.steps
    assert after.host_waits > 0.95 * after.steps


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(BenchmarkError, match="too few steady steps"):
        periods(Medians(None, 1.0, None, None))


def test_a_stop_set_that_no_engine_takes_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="15194 stop ids; an engine takes 4096"):
        Load(1, 1, 8, 10, 60, 1.0).stop_ids(151936)
    assert len(Load(1, 1, 8, 110, 60, 1.0).stop_ids(151936)) == 1381
