"""Predicted and observed gains of runs made by hand, where every step is known."""

from __future__ import annotations

import pytest

from benchmarks.attribution.gain import Gain, Side, periods
from benchmarks.attribution.serving import Load, Served
from benchmarks.attribution.steady import Medians, medians
from benchmarks.attribution.steps import StepLog, StepRecord
from benchmarks.common.result import BenchmarkError
from photon_ext.observe.cost_model import Periods, predict
from photon_ext.runtime.step import StepKind

MS = 1_000_000
LENGTH, REQUESTS = 40, 30


def run(depth: int, device_ms: float = 2.0, host_ms: float = 0.5, timing: bool = True) -> Served:
    """One stream: REQUESTS of LENGTH tokens, a prefill step and decode steps each.

    The host's part lies between the device's at depth 1 and is hidden at depth 2, where a step of
    zombies alone follows each request.
    """
    log, now = StepLog(depth=depth), 0.0
    gap = host_ms if depth == 1 else 0.003

    def step(kind: StepKind, ms: float, zombies: int = 0) -> None:
        nonlocal now
        now += gap + ms
        times = (ms * 1e3, gap * 1e3) if timing else (None, None)
        ready, end = round(now * MS), round((now + 0.1 * (depth == 2)) * MS)
        log.steps.append(StepRecord(ready, end, kind, 1, zombies, *times))

    for _ in range(REQUESTS):
        step(StepKind.PREFILL, device_ms + 0.2)
        for _ in range(LENGTH - 1):
            step(StepKind.DECODE, device_ms)
        if depth == 2:
            step(StepKind.DECODE, 0.1, zombies=1)
    return Served(log, LENGTH * REQUESTS, [LENGTH] * REQUESTS, REQUESTS, 0.0, 7)


def side(depth: int, observed: Served, usual: Served | None = None) -> Side:
    return Side(depth, medians([(usual or observed).log], 1), [observed], 1)


def test_medians_are_those_of_the_steps() -> None:
    blocking, pipelined = (medians([run(depth).log], 1) for depth in (1, 2))
    assert (blocking.decode, blocking.prefill) == pytest.approx((2.5, 2.7))
    assert (blocking.device, blocking.gap, blocking.dead) == (pytest.approx(2.0), 0.5, None)
    assert (pipelined.decode, pipelined.device) == pytest.approx((2.003, 2.0))
    assert (pipelined.gap, pipelined.dead) == pytest.approx((0.003, 0.103))


def test_a_prediction_from_medians_meets_what_is_observed() -> None:
    gain = Gain(side(1, run(1)), side(2, run(2)))
    block, pipe = Periods(2.5, 2.7), Periods(2.003, 2.203, 0.103)
    assert gain.prediction.gain == pytest.approx(predict(block, pipe, gain.pipe.work).gain)
    assert gain.observed == pytest.approx(gain.prediction.gain, abs=0.001)
    found = gain.as_dict()
    assert found["met"]
    assert found["cause"] is None
    assert found["tolerance"] == pytest.approx(0.1 * gain.prediction.gain)
    assert found["tokens_equal"]
    assert found["requests"] == found["stopped"] == REQUESTS
    assert found["parts"]["left_over_us"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("depth", "device_ms", "host_ms", "cause"),
    [
        (1, 2.2, 0.5, "ordinary_device"),
        (2, 2.2, 0.5, "ordinary_device"),
        (1, 2.0, 0.7, "ordinary_host"),
    ],
)
def test_what_ordinary_steps_have_more_of_is_named(
    depth: int, device_ms: float, host_ms: float, cause: str
) -> None:
    """In the observed run of one depth; the medians know nothing of it."""
    other = 3 - depth
    changed = side(depth, run(depth, device_ms, host_ms), usual=run(depth))
    sides = {depth: changed, other: side(other, run(other))}
    gain = Gain(sides[1], sides[2])
    first, *rest = gain.effects().items()
    name, effect = first
    assert name == cause
    off = gain.observed - gain.prediction.gain
    assert effect["points"] == pytest.approx(off, rel=0.15)
    changed_side = "block" if depth == 1 else "pipe"
    assert effect[changed_side]["ms"] == pytest.approx(0.2 * effect[changed_side]["steps"])
    shown = effect["medians"][changed_side]
    assert shown["here"] - shown["there"] == pytest.approx(0.2)
    assert all(abs(each["points"]) < 0.01 for _, each in rest)
    assert not gain.met
    assert f"{effect['points'] * 100:+.1f} by the {cause.split('_')[1]}'s part" in gain.explained()


def test_without_device_times_nothing_is_attributed() -> None:
    gain = Gain(side(1, run(1, timing=False)), side(2, run(2, timing=False)))
    assert gain.effects() == {}
    assert gain.as_dict()["parts"]["gap_us"] is None
    assert "what is left are ramp-up and ramp-down" in gain.explained()


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(BenchmarkError, match="too few steady steps"):
        periods(Medians(prefill=1.0))


def test_a_stop_set_that_no_engine_takes_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="15194 stop ids; an engine takes 4096"):
        Load(1, 1, 8, 10, 60, 1.0).stop_ids(151936)
    assert len(Load(1, 1, 8, 110, 60, 1.0).stop_ids(151936)) == 1381
