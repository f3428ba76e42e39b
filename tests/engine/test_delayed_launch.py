"""A launch that is held until the running step is about to end: who comes meanwhile rides in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any, NamedTuple

import pytest

from photon_ext.engine.request import Request
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import DelayedLaunch
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import expected_tokens
from tests.engine.stepped import Stepped

STEP_US, LAUNCH_US = 8000.0, 50.0
MARGIN_US = 300 + STEP_US / 16 + LAUNCH_US  # of the step; and the launch


class Ran(NamedTuple):
    """A step on the device, in us."""

    begin: float
    end: float

    def length_us(self) -> float:
        return self.end - self.begin

    def gap_us(self, previous: Ran) -> float:
        return self.begin - previous.end


class Arrivals:
    """In the place of a queue: what arrives by the test's clock."""

    def __init__(self, world: World) -> None:
        self._world, self._there = world, deque[Any]()

    def put(self, arrived: Any) -> None:
        self._there.append(arrived)

    def empty(self) -> bool:
        self._world.arrive()
        return not self._there

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            assert timeout is not None, "nobody would ever wake the loop"
            self._world.wait(1e6 * timeout)
        if self.empty():
            raise Empty
        return self._there.popleft()


class World(Stepped):
    """An engine whose steps last `us` each, on a clock that only waits and launches move.

    Attributes:
        now: us.
        us: how long the next step that is launched takes.
        coming: what happens at which time, in order.
        ran: the steps, in order of launch.
        riders: of each, how many decode rows and chunks it has.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, depth: int = 2) -> None:
        super().__init__(depth, 64, prefill="mixed")
        self.now, self.us = 0.0, STEP_US
        self.coming: deque[tuple[float, Callable[[], object]]] = deque()
        self.ran: list[Ran] = []
        self.riders: list[tuple[int, int]] = []
        self.loop._delay = DelayedLaunch(self.loop._times, clock=lambda: round(1e3 * self.now))
        self.engine._queue._arrived = Arrivals(self)  # type: ignore[assignment]
        launch, commit = self.pipeline.launch, self.pipeline.commit
        slots = self.pipeline._slots

        def launched(plan: Any) -> Any:
            step = launch(plan)
            if step is not None:
                self.now += LAUNCH_US
                begin = max(self.now, self.ran[-1].end if self.ran else 0.0)
                self.ran.append(Ran(begin, begin + self.us))
                step.span = self.ran[-1]  # type: ignore[assignment]
                self.riders.append((len(plan.decode), len(plan.chunks)))
            return step

        def committed() -> Any:
            if self.pipeline.inflight:
                step = self.pipeline._inflight[0].index
                self.now = max(self.now, self.ran[step].end)
            return commit()

        monkeypatch.setattr(self.pipeline, "launch", launched)
        monkeypatch.setattr(self.pipeline, "commit", committed)
        for slot in slots:
            monkeypatch.setattr(slot, "done", lambda: self.now >= self.ran[-1].end)

    def wait(self, us: float) -> None:
        """Until something comes, or so long."""
        until = self.now + us
        self.now = min([until, *(at for at, _ in self.coming)])

    def arrive(self) -> None:
        """What has come by now is there."""
        while self.coming and self.coming[0][0] <= self.now:
            self.coming.popleft()[1]()

    def at(self, us: float, what: Callable[[], object]) -> None:
        self.coming.append((us, what))

    def ask(self, prompt: list[int], count: int = 12) -> Request:
        return self.submit(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self.turn()

    @property
    def idle_us(self) -> list[float]:
        """How long the device waited before each step but the first."""
        return [own.gap_us(before) for before, own in zip(self.ran, self.ran[1:], strict=False)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_who_arrives_while_a_launch_is_held_rides_in_it(world: World) -> None:
    first = world.ask([1, 2, 3])
    world.until(lambda: len(world.ran) == 6)  # the last of them has just begun
    late: list[Request] = []
    world.at(world.ran[5].begin + STEP_US / 2, lambda: late.append(world.ask([4, 5])))
    world.run()
    assert world.riders[6] == (1, 1)
    assert [list(request.result().token_ids) for request in (first, *late)] == [
        expected_tokens([1, 2, 3], 12, VOCAB),
        expected_tokens([4, 5], 12, VOCAB),
    ]


def test_several_that_arrive_one_after_the_other_ride_in_it(world: World) -> None:
    world.ask([1, 2, 3])
    world.until(lambda: len(world.ran) == 6)
    for share in (0.2, 0.4, 0.6):
        world.at(world.ran[5].begin + share * STEP_US, lambda: world.ask([4]))
    world.run()
    assert world.riders[6] == (1, 3)


def test_who_is_cancelled_while_a_launch_is_held_does_not_ride_in_it(world: World) -> None:
    first, other = world.ask([1, 2, 3]), world.ask([4, 5])
    world.until(lambda: len(world.ran) == 6)
    ended: list[float] = []
    world.at(world.ran[5].begin + STEP_US / 4, other.cancel)
    world.at(world.ran[5].begin + STEP_US / 2, lambda: ended.append(other.done))
    world.run()
    assert [riders for riders, _ in world.riders[5:7]] == [2, 1]
    assert ended == [True], "its reader hears of it while the launch is still held"
    assert list(first.result().token_ids) == expected_tokens([1, 2, 3], 12, VOCAB)


def test_the_device_never_waits_for_a_launch_that_is_held(world: World) -> None:
    world.ask([1, 2, 3], 30)
    world.run()
    assert len(world.ran) == 30
    assert max(world.idle_us) == 0


def test_a_step_that_ends_before_its_time_costs_a_margin_once(world: World) -> None:
    world.ask([1, 2, 3], 30)
    world.until(lambda: len(world.ran) == 10)
    world.us = STEP_US / 4
    world.run()
    waited = [us for us in world.idle_us if us > 0]
    assert len(waited) == 1
    assert waited[0] < MARGIN_US


def test_the_blocking_loop_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, depth=1)
    world.ask([1, 2, 3])
    world.run()
    assert {*world.idle_us} == {LAUNCH_US}, "the next launch follows at once"


def test_behind_the_last_step_of_all_rows_nothing_is_held(world: World) -> None:
    world.ask([1, 2, 3])
    world.run()
    assert world.now == world.ran[-1].end


def test_close_ends_a_launch_that_is_held(world: World) -> None:
    request = world.ask([1, 2, 3])
    world.until(lambda: len(world.ran) == 6)
    world.at(world.ran[5].begin + STEP_US / 2, world.engine._queue.close)
    world.run()
    assert request.result().finish_reason == "cancelled"
    assert len(world.ran) == 6
    assert world.now == world.ran[-1].end
    assert not world.loop._collect(), "the loop ends"
