"""Long gaps between steps, planted in virtual time: found, counted and named."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from benchmarks.common.cause import Cause
from benchmarks.common.long_gaps import MOST, NOT_THE_HOST, long_gaps, long_gaps_text
from benchmarks.common.serving import Load, serve
from benchmarks.common.step_log import StepLog
from photon_ext.engine import Engine
from photon_ext.runtime.step import StepKind
from tests.benchmarks.virtual_device import MS, Costs, VirtualDevice, VirtualSlot

TOKENS = 200
EVERY = 60
"""Steps from one planted stall to the next; three in a run."""


def rarely(ms: float) -> tuple[float, ...]:
    return (*[0.0] * (EVERY - 1), ms)


def run(
    patch: pytest.MonkeyPatch, depth: int = 2, timing: bool = True, **planted: Any
) -> tuple[StepLog, float]:
    """The log of one run of 4 rows, and its gaps in all, ms.

    Without anything planted a step takes 2 ms at depth 2 and 2.5 at depth 1.
    """
    load = Load(4, 1, 8, None, TOKENS, 1.0)
    device = VirtualDevice(
        Costs(**planted), load.streams, depth, load.prompt + load.new_tokens, timing
    )
    patch.setattr(time, "perf_counter_ns", device.now)
    with Engine(
        device, lambda step: None, vocab_size=997, num_pages=4 * 16, buckets=(4,), chunk=64
    ) as engine:
        served = serve(engine, load, 1)
    return served.log, served.gap_s * 1e3


def test_a_steady_run_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = run(monkeypatch)
    assert long_gaps(log) == {"above_us": 50.0, "count": 0, "sum_ms": 0.0, "longest": []}
    assert long_gaps_text(long_gaps(log)) == ""


def test_without_timing_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = long_gaps(run(monkeypatch, timing=False)[0])
    assert found == {"above_us": None, "count": 0, "sum_ms": 0.0, "longest": []}
    assert long_gaps_text(found) == ""


@pytest.mark.parametrize(
    ("planted", "cause", "part"),
    [
        ({"launch_jitter": rarely(40.0)}, Cause.LAUNCH, "launch"),
        ({"commit_jitter": rarely(40.0)}, Cause.COMMIT, "commit"),
        ({"wake_up": rarely(40.0)}, Cause.WAKE_UP, "wait"),
    ],
    ids=["launches", "commits", "wake-ups"],
)
def test_a_planted_stall_is_placed(
    monkeypatch: pytest.MonkeyPatch, planted: dict[str, Any], cause: Cause, part: str
) -> None:
    log, sum_ms = run(monkeypatch, **planted)
    found = long_gaps(log)
    assert found["count"] == len(found["longest"]) == 3
    assert found["sum_ms"] == pytest.approx(sum_ms, rel=0.02)
    for gap in found["longest"]:
        assert gap["cause"] == cause.value
        assert gap["kind"] == StepKind.DECODE.value
        assert gap["rows"] == 4
        assert 36_000 < gap["gap_us"] <= 40_500, (
            "the stall, less what the device had to do meanwhile"
        )
        assert gap["host_ms"][part] - gap["usual_ms"][part] == pytest.approx(40.0, abs=2.5)
        assert gap["collected_ms"] == 0
        assert log.steps[gap["step"]].gap_us == gap["gap_us"]
    steps = sorted(gap["step"] for gap in found["longest"])
    assert [steps[1] - steps[0], steps[2] - steps[1]] == [EVERY, EVERY]
    first = found["longest"][0]
    assert long_gaps_text(found) == (
        f"3 gaps above 50 µs, {found['sum_ms']:.1f} ms in all; the longest "
        f"{first['gap_us'] / 1e3:.1f} ms before step {first['step']} "
        f"(decode): {cause.value}"
    )


def test_steps_of_long_gaps_are_those_that_were_launched_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The virtual device stalls in the launch whose number is one less than a multiple of EVERY,
    counted from 0.
    """
    log, _ = run(monkeypatch, launch_jitter=rarely(40.0))
    assert sorted(gap["step"] for gap in long_gaps(log)["longest"]) == [
        EVERY - 1,
        2 * EVERY - 1,
        3 * EVERY - 1,
    ]


def test_garbage_collection_is_told_from_what_it_falls_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = VirtualSlot.launch

    def collecting(slot: VirtualSlot, *given: Any) -> int:
        if slot.device.launches == 100:
            slow = [lambda phase, _: slot.device.sleep(30.0 * (phase == "stop"))]
            gc.callbacks[:0] = slow
            gc.collect()
            gc.callbacks.remove(slow[0])
        return launch(slot, *given)

    monkeypatch.setattr(VirtualSlot, "launch", collecting)
    (gap,) = long_gaps(run(monkeypatch)[0])["longest"]
    assert gap["step"] == 100
    assert gap["cause"] == Cause.GARBAGE.value
    assert gap["collected_ms"] == pytest.approx(30.0)


def test_a_device_that_begins_late_is_not_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = VirtualSlot.launch

    def late(slot: VirtualSlot, *given: Any) -> int:
        slot.device.free_ns += 20 * MS * (slot.device.launches == 100)
        return launch(slot, *given)

    monkeypatch.setattr(VirtualSlot, "launch", late)
    (gap,) = long_gaps(run(monkeypatch)[0])["longest"]
    assert (gap["step"], gap["cause"]) == (100, NOT_THE_HOST)
    assert gap["gap_us"] == pytest.approx(20_000, rel=0.01)


def test_a_blocking_loop_has_a_gap_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log, sum_ms = run(monkeypatch, depth=1, commit_jitter=rarely(40.0))
    found = long_gaps(log)
    assert found["count"] == len(log.steps) - 1
    assert len(found["longest"]) == MOST
    assert found["sum_ms"] == pytest.approx(sum_ms)
    assert [gap["cause"] for gap in found["longest"][:3]] == [Cause.COMMIT.value] * 3
    assert found["longest"][0]["gap_us"] == pytest.approx(40_500)
