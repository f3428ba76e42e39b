"""Which steps are timed, how, and what is known of them then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from photon_ext.row_params import RowParams
from photon_ext.runtime import Pipeline, StepPlan
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Chunk
from photon_ext.runtime.step_features import StepFeatures
from photon_ext.scheduling.step_times import EVERY, StepLoad, StepTimes
from photon_ext.testing.stub import StubDevice


class Heard(StepTimes):
    """Notes what was timed."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__((1, 2, 4), clock)
        self.times: list[tuple[int, int, float]] = []

    def add(self, load: StepLoad, us: float) -> None:
        super().add(load, us)
        self.times.append((load.decode_rows, load.prompt_tokens, us))


class FakeSpan:
    def __init__(self, us: float) -> None:
        self.us, self.reads = us, 0

    def length_us(self) -> float:
        self.reads += 1
        return self.us


class Timed:
    """A pipeline on a device that computes nothing, and a clock that the test moves, in us."""

    def __init__(self, spans: bool) -> None:
        self.now = 0.0
        self.heard = Heard(lambda: round(1e3 * self.now))
        self.spans: list[FakeSpan] | None = [] if spans else None
        self.pipe = Pipeline(
            StubDevice(9, depth=1), lambda step: None, vocab_size=32, chunk=16, lora_slots=2
        )

    def row(self, prompt: int, cap: int = 99, lora_slot: int = 0) -> Row:
        return self.pipe.admit(range(prompt), RowParams(cap), range(8), lora_slot=lora_slot)

    def step(self, us: float, *chunks: Chunk) -> None:
        assert self.pipe.launch(StepPlan(self.pipe.running_set.decode, chunks)) is not None
        self.now += us
        result = self.pipe.commit()
        if self.spans is not None:
            self.spans.append(FakeSpan(us))
            step: Any = result.step
            step.span = self.spans[-1]
        self.heard.committed(result, self.pipe.busy)


@pytest.mark.parametrize("spans", [True, False])
def test_a_mixed_step_is_told_by_bucket_of_rows_and_by_its_prompt_tokens(spans: bool) -> None:
    timed = Timed(spans)
    rows = [timed.row(3), timed.row(2), timed.row(9), timed.row(9)]
    timed.step(5.0, Chunk(rows[0], 3), Chunk(rows[1], 2))  # no decode row: not told
    timed.step(7.0, Chunk(rows[2], 1), Chunk(rows[3], 3))
    timed.step(8.0)
    assert timed.heard.times == [(8, 4, 7.0), (8, 0, 8.0)]


def test_steps_with_adapters_are_told_as_such_also_where_a_prompt_alone_has_one() -> None:
    timed = Timed(spans=True)
    plain, adapted = timed.row(1), timed.row(3, lora_slot=2)
    timed.step(5.0, Chunk(plain, 1))
    timed.step(7.0, Chunk(adapted, 1))
    timed.step(7.5, Chunk(adapted, 2))
    timed.step(8.0)
    usual = {load: known.usual for load, known in timed.heard.known.items()}
    loads = [StepLoad(*load, StepFeatures.LORA) for load in ((1, 1), (1, 2), (8, 0))]
    assert usual == dict(zip(loads, (7.0, 7.5, 8.0), strict=True))
    assert timed.heard.latest_us == 8.0


def test_prompt_tokens_that_are_no_budget_tell_nothing() -> None:
    """The end of a prompt is cheaper than the budget that it was allowed."""
    for spans in (True, False):
        timed = Timed(spans)
        plain, long = timed.row(1), timed.row(9)
        timed.step(5.0, Chunk(plain, 1))
        timed.step(7.0, Chunk(long, 3))
        timed.step(7.0, Chunk(long, 2))
        assert timed.heard.times == [(1, 2, 7.0)]
        assert sum(span.reads for span in timed.spans or ()) == spans


def test_the_least_falls_at_once_and_the_most_rises_at_once() -> None:
    times, load = StepTimes(), StepLoad(8)
    for us in (800.0, 1600.0, 0.0):
        times.add(load, us)
    known = times.known[load]
    assert (known.least, known.usual, known.most) == (0.0, 787.5, 1400.0)
    times.add(load, 64.0)
    assert known.least == 1.0


def test_of_decode_steps_of_the_same_rows_the_clock_times_few() -> None:
    timed = Timed(spans=False)
    row = timed.row(1)
    timed.step(5.0, Chunk(row, 1))
    for _ in range(2 * EVERY + 1):
        timed.step(3.0)
    assert timed.heard.times == [(1, 0, 3.0)] * 3
    long = timed.row(4)
    timed.step(4.0, Chunk(long, 2))
    timed.step(6.0)
    assert timed.heard.times[3:] == [(1, 2, 4.0), (1, 0, 6.0)]


def test_the_clock_does_not_count_a_rest() -> None:
    timed = Timed(spans=False)
    row = timed.row(1, cap=2)
    timed.step(5.0, Chunk(row, 1))
    timed.step(6.0)
    assert not timed.pipe.busy
    timed.now += 1e6
    row = timed.row(1, cap=3)
    timed.step(7.0, Chunk(row, 1))
    timed.step(8.0)
    assert timed.heard.times == [(1, 0, 6.0), (1, 0, 8.0)]


def test_a_step_whose_rows_had_all_ended_tells_nothing() -> None:
    """Its kernels return before they read a weight."""
    timed = Timed(spans=True)
    row = timed.row(1)
    timed.step(5.0, Chunk(row, 1))
    assert timed.pipe.launch() is not None
    timed.pipe.abort(row)
    result = timed.pipe.commit()
    assert timed.heard.committed(result, timed.pipe.busy) is None
    assert timed.heard.times == []
