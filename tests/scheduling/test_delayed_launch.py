"""For how long a launch may wait, by what steps and launches took."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from photon_ext.runtime import StepKey, StepResult
from photon_ext.scheduling import StepTimes
from photon_ext.scheduling.delayed_launch import FIRST_LAUNCH_US, LEAST_MARGIN_US, DelayedLaunch

DECODE = StepKey(8, 0, 0, False)
MANY = StepKey(16, 0, 0, False)
MIXED = StepKey(8, 64, 4, False)


class FakeSpan(NamedTuple):
    us: float

    def length_us(self) -> float:
        return self.us


class FakeChunk(NamedTuple):
    num_tokens: int


class FakeStep(NamedTuple):
    """What DelayedLaunch and StepTimes read of a step, which is its own batch."""

    key: StepKey
    span: FakeSpan | None
    chunks: tuple[FakeChunk, ...] = ()

    @property
    def batch(self) -> FakeStep:
        return self


class Held:
    """A hold whose clock the test moves, in us."""

    def __init__(self, enabled: bool = True) -> None:
        self.now = 0.0
        self.times = StepTimes((64,))
        self.hold = DelayedLaunch(self.times, enabled, lambda: round(1e3 * self.now))

    def step(
        self, us: float | None, key: StepKey = DECODE, tokens: int = 0, launch_us: float = 100.0
    ) -> None:
        """A step like this is launched in time, and committed when it ends."""
        self.held_us()
        self.now += launch_us
        span = None if us is None else FakeSpan(us)
        chunks = (FakeChunk(tokens),) if tokens else ()
        step: Any = FakeStep(key, span, chunks)
        self.hold.launched(step)
        self.now += us or 0.0
        self.commit(StepResult(step, count=8))

    def commit(self, result: StepResult) -> None:
        self.times.committed(result, busy=True)
        self.hold.committed(result)

    def launch(self, key: StepKey = DECODE, tokens: int = 0) -> None:
        """One that runs from now on."""
        step: Any = FakeStep(key, FakeSpan(0), (FakeChunk(tokens),) if tokens else ())
        self.hold.launched(step)

    def held_us(self) -> float:
        """For how long the launch behind it is held in all, at its own time."""
        begin = self.now
        while left_s := self.hold.left_s():
            self.now += 1e6 * left_s
        return self.now - begin


def margin(us: float) -> float:
    return us / 16 + LEAST_MARGIN_US


def test_a_launch_is_held_until_a_margin_before_the_running_step_ends() -> None:
    held = Held()
    held.step(8000)
    held.launch()
    assert held.held_us() == pytest.approx(8000 - margin(8000) - FIRST_LAUNCH_US, abs=1)


def test_nothing_is_held_behind_a_step_that_nothing_is_known_of() -> None:
    held = Held()
    held.step(8000)
    held.launch(MANY)
    assert held.held_us() == 0
    held.step(8000, MANY)
    held.launch(MANY)
    assert held.held_us() > 0


def test_nothing_is_held_behind_prompts_whose_times_differ() -> None:
    held = Held()
    for _ in range(3):
        held.step(8000, MIXED, 64)
        held.launch(MIXED, 64)
        assert held.held_us() == 0


@pytest.mark.parametrize(("us", "holds"), [(100, False), (1999, False), (2001, True)])
def test_short_steps_are_followed_at_once(us: float, holds: bool) -> None:
    held = Held()
    held.step(us)
    held.launch()
    assert (held.held_us() > 0) is holds


def test_nothing_is_held_that_launches_take_too_long_for() -> None:
    held = Held()
    for _ in range(20):
        held.step(2500, launch_us=5000)
    held.launch()
    assert held.held_us() == 0


def test_nothing_is_held_without_times_or_where_it_is_off() -> None:
    for held, us in ((Held(), None), (Held(enabled=False), 8000)):
        held.step(us)
        held.launch()
        assert held.held_us() == 0


def test_a_shorter_time_counts_in_full_and_a_longer_one_little() -> None:
    held = Held()
    for us, expected in ((8000, 8000), (4000, 4000), (8000, 4000 + 4000 / 64)):
        held.step(us)
        held.launch()
        known = (held.held_us() + LEAST_MARGIN_US + held.hold._launch_us) / (1 - 1 / 16)
        assert known == pytest.approx(expected, abs=1)


def test_a_step_of_dead_rows_alone_tells_nothing() -> None:
    held = Held()
    held.step(8000)
    dead: Any = FakeStep(DECODE, FakeSpan(10))
    held.hold.launched(dead)
    held.commit(StepResult(dead, zombies=8))
    held.launch()
    assert held.held_us() > 5000


def test_a_running_step_counts_from_the_commit_of_the_one_before() -> None:
    held = Held()
    held.step(8000)
    held.launch()
    held.now += 3000  # the step before still ran for so long
    before: Any = FakeStep(MIXED, None)
    held.commit(StepResult(before))
    assert held.held_us() == pytest.approx(8000 - margin(8000) - held.hold._launch_us, abs=1)


def test_it_is_asked_again_within_a_margin() -> None:
    held = Held()
    held.step(8000)
    held.launch()
    assert 0 < held.hold.left_s() <= margin(8000) / 1e6


def test_what_launches_take_is_covered_but_for_one_of_a_hundred() -> None:
    held = Held()
    for number in range(2000):
        held.step(8000, launch_us=5000 if number % 200 == 199 else 300)
    assert 300 <= held.hold._launch_us < 600
    for _ in range(20):
        held.step(8000, launch_us=3000)
    assert held.hold._launch_us >= 3000


def test_a_late_wake_up_is_part_of_what_a_launch_takes() -> None:
    held = Held()
    held.step(8000)
    held.launch()
    before = held.hold._launch_us
    held.held_us()
    held.now += 2 * FIRST_LAUNCH_US
    assert held.hold.left_s() == 0
    held.launch()
    assert held.hold._launch_us > before


def test_time_without_work_is_no_part_of_what_a_launch_takes() -> None:
    held = Held()
    held.step(8000)
    held.hold.left_s()  # behind the last step, in the turn that finds nothing to launch
    held.commit(StepResult())
    assert held.held_us() == 0
    before = held.hold._launch_us
    held.now += 1e6
    held.launch()
    assert held.hold._launch_us <= before
