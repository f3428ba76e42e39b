"""Predicted and observed gains in virtual time, where nothing but the model can be wrong: the
real engine, loop and log.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from benchmarks.common.calibration import Calibration
from benchmarks.common.cause import Cause, Excess
from benchmarks.common.gain import Effect, Gain, Side, periods
from benchmarks.common.result import BenchmarkError
from benchmarks.common.serving import LONGEST, Load, Served, serve
from benchmarks.common.steady import Medians
from photon_ext.engine import Engine
from photon_ext.observe.cost_model import Periods, StepParts, predict_from_parts
from photon_ext.runtime.step import StepKey, StepKind
from tests.benchmarks.virtual_device import Costs, VirtualDevice, VirtualSlot

VOCAB, LENGTH = 997, 40
FAST = Costs()
ALONE = {1: 1.0}
"""A request in each prefill step."""


class Change(NamedTuple):
    """What the observed runs have that those of the medians do not."""

    costs: Costs | None = None
    prompt: int = 8


UNCHANGED = Change()


def run(
    costs: Costs,
    streams: int,
    depth: int,
    requests: list[int],
    patch: pytest.MonkeyPatch,
    change: Change = UNCHANGED,
    timing: bool = False,
) -> tuple[Calibration, list[Served], Engine]:
    """Medians of two runs, and further runs of `requests` per stream each."""
    device = VirtualDevice(costs, streams, depth, change.prompt + LONGEST * LENGTH, timing)
    patch.setattr(time, "perf_counter_ns", device.now)
    engine = Engine(
        device,
        lambda step: None,
        vocab_size=VOCAB,
        num_pages=streams * 24,
        buckets=(1, 8),
        chunk=512,
    )
    with engine:
        found = Calibration.of(
            [serve(engine, replace(load(streams, 8), aged=True), seed).log for seed in (1, 2)],
            streams,
        )
        device.costs = change.costs or costs
        observed = [
            serve(engine, load(streams, each, change.prompt), 1000 + i)
            for i, each in enumerate(requests)
        ]
        return found, observed, engine


def load(streams: int, requests: int, prompt: int = 8) -> Load:
    return Load(streams, requests, prompt, LENGTH, LONGEST * LENGTH, 1.0)


def gains(
    costs: Costs,
    streams: int,
    requests: list[int],
    patch: pytest.MonkeyPatch,
    change: Change = UNCHANGED,
) -> list[Gain]:
    """Depth 1 against depth 2: a gain for each of `requests`."""
    sides = [run(costs, streams, depth, requests, patch, change)[:2] for depth in (1, 2)]
    made = []
    for i in range(len(requests)):
        block, pipe = (
            Side(depth, found, [served[i]], streams)
            for depth, (found, served) in zip((1, 2), sides, strict=True)
        )
        made.append(Gain(block, pipe))
    return made


def effect_of(gain: Gain, cause: Cause) -> Effect:
    """What one cause did; nothing, where it is not there."""
    return next(
        (effect for effect in gain.effects() if effect.cause is cause),
        Effect(cause, Excess(), Excess(), 0.0),
    )


def test_periods_are_those_of_the_device_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    blocking = periods(run(FAST, 4, 1, [], monkeypatch)[0].usual, ALONE)
    assert vars(blocking) == pytest.approx(vars(Periods(decode_ms=2.5, prefill_ms=2.7)))
    four = periods(run(FAST, 4, 2, [], monkeypatch)[0].usual, ALONE)
    assert (four.decode_ms, four.prefill_ms) == pytest.approx((2.0, 2.2))
    one = periods(run(FAST, 1, 2, [], monkeypatch)[0].usual, ALONE)
    # a single stream begins anew with a bubble
    assert (one.decode_ms, one.prefill_ms) == pytest.approx((2.0, 2.7))
    # what is left of it after the commit before, and its own commit
    assert one.dead_ms == pytest.approx(0.2, abs=0.11)


@pytest.mark.parametrize(("streams", "requests"), [(1, 30), (8, 30), (16, 30)])
def test_predictions_meet_observations(
    monkeypatch: pytest.MonkeyPatch, streams: int, requests: int
) -> None:
    (gain,) = gains(FAST, streams, [requests], monkeypatch)
    assert gain.tokens_equal
    assert abs(gain.observed - gain.prediction.gain) <= 0.01, gain.explained()
    assert gain.met
    assert 0.15 < gain.prediction.gain <= 0.25
    assert gain.work.tokens_per_request == pytest.approx(LENGTH, rel=0.15)


def test_a_zombie_that_costs_a_whole_forward_is_seen_at_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published case, where only the host knows of stops: the tax is 1 / L, and predicted."""
    (costly,), (cheap,) = (gains(Costs(dead=dead), 1, [30], monkeypatch) for dead in (2.0, 0.1))
    assert costly.met
    assert cheap.met
    assert cheap.observed - costly.observed == pytest.approx(1.25 / LENGTH, rel=0.25)


def test_a_short_run_falls_short_by_its_ramp_down_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published shortfall at 32 streams: host work grows with the batch, so that steps of an
    emptying batch have less to gain.
    """
    costs = Costs(decode=3.8, prefill=3.9, launch=0.2, commit=0.0, commit_per_row=0.05)
    enough, short = gains(costs, 32, [60, 1], monkeypatch)
    assert enough.met, enough.explained()
    assert enough.observed_full == pytest.approx(enough.prediction.gain, abs=0.015)
    assert not short.met
    assert short.observed < short.prediction.gain - 0.05
    effects = short.effects()
    assert min(effects, key=lambda effect: effect.points).cause is Cause.RAMP
    assert "by ramp-up and ramp-down" in short.explained()
    assert sum(effect.points for effect in effects) == pytest.approx(
        short.observed - short.prediction.gain, abs=0.01
    )


@pytest.mark.parametrize("streams", [1, 8])
def test_jitter_that_is_always_there_is_in_the_medians(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    """A blocking loop that wakes up late now and then pays for it in every run: the prediction
    is to say so.
    """
    (gain,) = gains(Costs(wake_up=(0.0, 0.1, 0.0, 1.2, 0.3)), streams, [30], monkeypatch)
    assert gain.met, gain.explained()
    assert gain.prediction.gain > 0.3, (
        "the mean wake-up, 0.32 ms, and not the median one, is hidden"
    )


def disturbed(costs: Costs, streams: int, patch: pytest.MonkeyPatch, timing: bool = False) -> Gain:
    """Depth 1 has other costs while it is observed."""
    block = run(FAST, streams, 1, [30], patch, Change(costs), timing)[:2]
    return Gain(Side(1, *block, streams), Side(2, *undisturbed(streams, patch, timing), streams))


# in virtual time it is the same every time
_undisturbed: dict[tuple[int, bool], tuple[Calibration, list[Served]]] = {}


def undisturbed(
    streams: int, patch: pytest.MonkeyPatch, timing: bool
) -> tuple[Calibration, list[Served]]:
    """Depth 2, observed as it was in the runs of the medians."""
    key = streams, timing
    if key not in _undisturbed:
        _undisturbed[key] = run(FAST, streams, 2, [30], patch, timing=timing)[:2]
    return _undisturbed[key]


def test_medians_are_taken_at_the_contexts_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes as long as its longest row, a batch that has just begun would promise
    too much.
    """
    (gain,) = gains(Costs(per_longest=0.01), 8, [30], monkeypatch)
    assert gain.met, gain.explained()
    periods_ms = [ms for step, ms in gain.pipe.runs[0].log.intervals_ms() if step.steady(8)]
    assert gain.pipe.periods.decode_ms == pytest.approx(fmean(periods_ms), rel=0.03)
    assert gain.pipe.calibration.usual.per_longest == pytest.approx(0.01, rel=0.01)
    assert gain.pipe.calibration.usual.longest > 2 * LENGTH


@pytest.mark.parametrize("streams", [8, 16])
def test_prefill_steps_are_predicted_by_the_requests_in_them(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    """Most have one; those of more take longer, and depth 2 has more of them.

    A median of all would be that of one request.
    """
    (gain,) = gains(Costs(prefill=20.0, prefill_doubled=15.0), streams, [30], monkeypatch)
    for side in (gain.block, gain.pipe):
        assert side.calibration.usual.prefill(2) == pytest.approx(
            (side.calibration.usual.prefill(1) or 0) + 15.0, abs=0.3
        )
        later = [
            ms
            for step, ms in side.runs[0].log.intervals_ms()
            if step.kind is StepKind.PREFILL and step.rows < streams // 2
        ]
        assert side.periods.prefill_ms == pytest.approx(fmean(later), rel=0.03)
    assert gain.pipe.periods.prefill_ms > gain.block.periods.prefill_ms - 0.5, (
        "the host's part is hidden, and more requests share one"
    )
    assert abs(effect_of(gain, Cause.PREFILL).points) < 0.01
    assert abs(gain.observed - gain.prediction.gain) < 0.015, gain.explained()


def test_a_size_without_a_median_is_taken_for_the_nearest_smaller_one() -> None:
    found = Medians(prefills={2: 3.0, 4: 5.0})
    assert [found.prefill(requests) for requests in (1, 2, 3, 4, 5, 32)] == [
        3.0,
        3.0,
        5.0,
        5.0,
        5.0,
        5.0,
    ]
    assert found.mean_prefill({1: 0.5, 3: 0.25, 9: 0.25}) == 4.0
    assert Medians().prefill(1) is None


def test_aged_requests_are_the_first_ones_and_keep_within_the_cap() -> None:
    young, aged = load(200, 2), replace(load(200, 2), aged=True)
    assert all(len(prompt) == 8 for prompt in young.asked(VOCAB, 5)[0])
    prompts, params = aged.asked(VOCAB, 5)
    ages = [len(prompt) - 8 for prompt in prompts]
    assert ages[200:] == [0] * 200
    assert fmean(ages[:200]) == pytest.approx(LENGTH, rel=0.2)
    assert all(
        age + one.max_new_tokens == LONGEST * LENGTH for age, one in zip(ages, params, strict=True)
    )
    assert min(one.max_new_tokens for one in params) >= LENGTH


RARE = 97  # steps from one planted delay to the next


def rarely(ms: float) -> tuple[float, ...]:
    return (*[0.0] * (RARE - 1), ms)


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({"jitter": rarely(40.0)}, Cause.WAIT),
        ({"wake_up": rarely(40.0)}, Cause.WAIT),
        ({"launch_jitter": rarely(40.0)}, Cause.LAUNCH),
        ({"commit_jitter": rarely(40.0)}, Cause.COMMIT),
        ({"decode": 2.1}, Cause.LEVEL),
        ({"after_prefill": 1.5}, Cause.TURNING),
        ({"prefill": 6.0}, Cause.PREFILL),
    ],
    ids=["slow steps", "wake-ups", "launches", "commits", "clocks", "admissions", "prefills"],
)
def test_what_is_planted_is_named(
    monkeypatch: pytest.MonkeyPatch, planted: dict[str, Any], cause: Cause
) -> None:
    """In the observed run of one depth, so that the gain suffers; the medians know nothing of
    it.
    """
    gain = disturbed(replace(FAST, **planted), 8, monkeypatch)
    largest = max(gain.effects(), key=lambda effect: effect.points)
    assert largest.cause is cause, gain.explained()
    assert largest.points > 0.6 * (gain.observed - gain.prediction.gain)
    assert largest.block.ms > 30
    assert largest.block.steps >= 5
    if not gain.met:
        assert cause.value in gain.explained()
    assert sum(effect.points for effect in gain.effects()) == pytest.approx(
        gain.observed - gain.prediction.gain, abs=0.005
    )


def test_device_times_tell_slow_steps_from_late_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    for planted, cause in (
        ({"jitter": rarely(40.0)}, Cause.DEVICE),
        ({"wake_up": rarely(40.0)}, Cause.WAKE_UP),
    ):
        gain = disturbed(replace(FAST, **planted), 1, monkeypatch, timing=True)
        assert max(gain.effects(), key=lambda effect: effect.points).cause is cause
        assert effect_of(gain, Cause.WAIT).points == 0


@pytest.mark.parametrize(
    ("planted", "device_ms", "host_ms"),
    [
        ({"launch": 0.4}, 0.0, 0.1),
        ({"wake_up": (0.05, 0.1, 0.15)}, 0.0, 0.1),
        ({"commit": 0.1}, 0.0, -0.1),
        ({"decode": 2.1}, 0.1, 0.0),
        ({"jitter": (-0.05, -0.1, -0.15)}, -0.1, 0.0),
        ({"decode": 2.1, "launch": 0.2}, 0.1, -0.1),
    ],
    ids=[
        "launches",
        "wake-ups",
        "shorter commits",
        "clocks",
        "faster steps",
        "both, against each other",
    ],
)
def test_device_times_split_what_ordinary_steps_have(
    monkeypatch: pytest.MonkeyPatch, planted: dict[str, Any], device_ms: float, host_ms: float
) -> None:
    """A drift of the one is not taken for the other's; together they are what has one name
    without device times.
    """
    costs = replace(FAST, **planted)
    gain = disturbed(costs, 8, monkeypatch, timing=True)
    effects = effect_of(gain, Cause.ORDINARY_DEVICE), effect_of(gain, Cause.ORDINARY_HOST)
    for effect, each_ms in zip(effects, (device_ms, host_ms), strict=True):
        assert effect.block.ms == pytest.approx(
            each_ms * effect.block.steps, abs=0.01 * effect.block.steps
        )
        assert effect.block_medians is not None
        assert effect.block_medians.here - effect.block_medians.there == pytest.approx(
            each_ms, abs=0.01
        )
        assert abs(effect.pipe.ms) < 0.01 * effect.pipe.steps
    shown = effects[1].block_medians
    assert shown is not None
    assert (
        f"(median gap {shown.here:.3f} ms here, 0.500 in the run of the medians)"
        in effects[1].text()
    )
    whole = effect_of(disturbed(costs, 8, monkeypatch), Cause.LEVEL)
    assert sum(effect.block.ms for effect in effects) == pytest.approx(whole.block.ms, abs=0.5)
    assert effect_of(gain, Cause.LEVEL).block == Excess()


def test_longer_contexts_are_not_the_device_s_part_of_ordinary_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a token costs is seen on the device, whatever the wake-ups are like meanwhile."""
    costs = Costs(per_token=0.005, wake_up=(0.0, 0.1, 0.05, 0.2))
    found, observed, _ = run(costs, 8, 1, [20], monkeypatch, Change(prompt=48), timing=True)
    assert found.usual.per_token == pytest.approx(0.005, rel=0.02)
    side = Side(1, found, observed, 8)
    tally = side.excess(side.work)
    device, growth = tally.of(Cause.ORDINARY_DEVICE), tally.of(Cause.CONTEXT)
    assert growth.ms == pytest.approx(growth.steps * 40 * 0.005, rel=0.3)
    assert abs(device.ms) < 0.01 * growth.ms
    compared = side.paces[Cause.ORDINARY_DEVICE]
    assert compared.here == pytest.approx(compared.there, abs=0.001)


def test_contexts_longer_than_those_of_the_medians_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (gain,) = gains(Costs(per_token=0.02), 8, [20], monkeypatch, Change(prompt=48))
    growth = effect_of(gain, Cause.CONTEXT)
    assert growth == min(gain.effects(), key=lambda effect: effect.points)
    assert growth.points < 0.8 * (gain.observed - gain.prediction.gain) < 0
    assert growth.block.ms == pytest.approx(growth.block.steps * 40 * 0.02, rel=0.3)
    assert not gain.met
    assert "by growth of contexts" in gain.explained()


@pytest.mark.parametrize("kind", StepKind)
def test_garbage_collection_is_named(monkeypatch: pytest.MonkeyPatch, kind: StepKind) -> None:
    """A collection every now and then that takes 30 ms at depth 1, on the run's own clock."""
    launch, launches = VirtualSlot.launch, Counter[StepKind]()

    def collecting(slot: VirtualSlot, key: StepKey, *given: Any) -> int:
        launches[key.kind] += 1
        rare = RARE if kind is StepKind.DECODE else 5
        if (
            key.kind is kind
            and not launches[kind] % rare
            and slot.device.depth == 1
            and slot.device.costs != FAST
        ):
            slow = [lambda phase, _: slot.device.sleep(30.0 * (phase == "stop"))]
            gc.callbacks[:0] = slow
            gc.collect()
            gc.callbacks.remove(slow[0])
        return launch(slot, key, *given)

    monkeypatch.setattr(VirtualSlot, "launch", collecting)
    gain = disturbed(replace(FAST, dead=0.11), 1, monkeypatch)
    largest = max(gain.effects(), key=lambda effect: effect.points)
    assert largest.cause is Cause.GARBAGE
    assert largest.block.ms == pytest.approx(30 * largest.block.steps, rel=0.1)


def test_a_device_that_hides_everything_shows_what_the_parts_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (gain,) = gains(FAST, 8, [20], monkeypatch)
    parts = predict_from_parts(StepParts(1.9, 0.1, 0.5), gain.work)
    assert parts.gain == pytest.approx(gain.observed, abs=0.015)


def test_a_slow_forward_hardly_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    (gain,) = gains(Costs(decode=35.0, prefill=36.0, dead=0.2), 8, [60], monkeypatch)
    assert gain.met
    assert gain.observed < 0.02
    # a full batch of short answers: the row-steps lost are more than what is hidden
    assert "does not pay" in gain.prediction.verdict


def test_the_meter_sees_the_bubble_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, blocking = run(FAST, 4, 1, [4], monkeypatch)
    _, _, pipelined = run(FAST, 4, 2, [4], monkeypatch)
    before, after = blocking.meter.snapshot(), pipelined.meter.snapshot()
    assert before.device_waits >= before.steps - 3  # all but the first of each run
    assert after.device_waits < 0.05 * after.steps
    assert after.host_waits > 0.95 * after.steps


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(BenchmarkError, match="too few steady steps"):
        periods(Medians(prefills={1: 1.0}), ALONE)


def test_a_stop_set_that_no_engine_takes_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="15194 stop ids; an engine takes 4096"):
        Load(1, 1, 8, 10, 60, 1.0).stop_ids(151936)
    assert len(Load(1, 1, 8, 110, 60, 1.0).stop_ids(151936)) == 1381
