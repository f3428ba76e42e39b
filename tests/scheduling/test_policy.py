"""Policies: one order of all requests, in which rows are given and, from its end, taken away."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from photon_ext.errors import ConfigError, RequestError
from photon_ext.runtime.running_set import RunningSet
from photon_ext.scheduling import (
    FirstCome,
    PagePool,
    Pager,
    Planner,
    Policy,
    Priority,
    Scheduler,
    Sequence,
    ShortestPrompt,
)
from photon_ext.scheduling.policy import Key, checked_key, choose_policy
from tests.scheduling.sequences import make_sequence

ALL = pytest.mark.parametrize("policy", [FirstCome(), ShortestPrompt(), Priority()])


class Server:
    """A scheduler and its planner, with as many rows and pages as it takes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.scheduler = Scheduler(Pager(PagePool(1000), 4, share=False), 100, max_len=64)
        self.planner = Planner(self.scheduler, RunningSet(), 16)

    def add(self, prompt: int, priority: int = 0, arrived: float = 0.0) -> Sequence:
        sequence = make_sequence(prompt, 1, priority=priority, arrived=arrived)
        sequence.key = checked_key(self.policy, sequence)
        self.scheduler.registry.add([sequence])
        self.scheduler.add(sequence)
        return sequence

    def next(self) -> Sequence:
        return next(self.planner.admissions())[0]

    def rest(self) -> list[Sequence]:
        return [sequence for sequence, _ in self.planner.admissions()]


def test_first_come_first_served_whatever_they_ask() -> None:
    server = Server(FirstCome())
    added = [server.add(9), server.add(2, priority=7), server.add(5)]
    assert server.rest() == added


def test_the_shortest_prompt_is_next_and_of_equal_ones_who_came_first() -> None:
    server = Server(ShortestPrompt())
    added = [server.add(prompt) for prompt in (9, 2, 5, 2, 1)]
    assert server.rest() == [added[i] for i in (4, 1, 3, 2, 0)]


def test_the_highest_priority_is_next_and_of_equal_ones_who_came_first() -> None:
    server = Server(Priority())
    added = [server.add(1, priority) for priority in (0, 3, -2, 3, 1)]
    assert server.rest() == [added[i] for i in (1, 3, 4, 0, 2)]


def test_waiting_raises_a_request_by_one_each_ageing_time() -> None:
    server = Server(Priority(ageing_s=10))
    low, soon, late = server.add(1, 0, 100.0), server.add(1, 2, 119.0), server.add(1, 2, 121.0)
    assert server.rest() == [soon, low, late]


@pytest.mark.parametrize(("ageing_s", "served"), [(10.0, True), (1e6, False)])
def test_ageing_starves_nobody(ageing_s: float, served: bool) -> None:
    """Every second somebody of priority 5 comes and one row is free; a request of priority 0 has
    its turn after 5 times the ageing time. Where it hardly ages, it waits on.
    """
    server = Server(Priority(ageing_s))
    low, seconds = server.add(1, 0, 0.0), 0
    server.add(1, 5, 0.0)
    while low in server.scheduler.waiting and seconds < 200:
        server.add(1, 5, float(seconds))
        server.next()
        seconds += 1
    assert (low not in server.scheduler.waiting) is served
    assert not served or 50 <= seconds <= 53


@ALL
def test_the_order_is_total_and_the_victim_is_its_last(policy: Policy) -> None:
    server, chance = Server(policy), random.Random(3)
    added = [
        server.add(chance.randint(1, 5), chance.randint(-2, 2), chance.choice([0.0, 40.0]))
        for _ in range(40)
    ]
    running = server.rest()
    assert sorted(running, key=lambda sequence: sequence.rank) == running
    assert len({sequence.rank for sequence in added}) == 40
    chance.shuffle(added)
    for last in reversed(running):
        assert server.planner.victim(added) is last
        added.remove(last)


@ALL
def test_hazard_12_who_comes_back_keeps_its_place(policy: Policy) -> None:
    """Before who came later, behind who was before, though it has more tokens by now."""
    server = Server(policy)
    first, back, other = server.add(4), server.add(4, arrived=1.0), server.add(4, arrived=2.0)
    grant = server.scheduler.schedule(back)
    assert grant is not None
    back.admission = make_sequence(20, 1).admission  # it ran
    later = server.add(4, arrived=3.0)
    server.scheduler.cancel(back, grant)
    assert server.rest() == [first, back, other, later]


def test_who_waits_first_is_not_overtaken_where_pages_are_short() -> None:
    server = Server(ShortestPrompt())
    server.scheduler.pool.allocate(998)
    long = server.add(20)
    assert server.rest() == []
    short = server.add(1)
    assert server.rest() == [short], "shorter ones are first"
    assert list(server.scheduler.waiting) == [long]


# --- what is refused ------------------------------------------------------------------------------


class Own:
    """A policy that returns what it was made with."""

    def __init__(self, key: object) -> None:
        self._key = key

    def key(self, sequence: Sequence) -> Key:
        return self._key() if callable(self._key) else self._key  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["first-come", "shortest-prompt", "priority"])
def test_a_policy_has_a_name(name: str) -> None:
    kinds = {"first-come": FirstCome, "shortest-prompt": ShortestPrompt, "priority": Priority}
    assert type(choose_policy(name)) is kinds[name]


def test_a_policy_may_be_your_own_object() -> None:
    own = Own((1, 2.5, Fraction(1, 3), math.inf))
    assert choose_policy(own) is own
    assert checked_key(own, make_sequence(1, 1)) == (1, 2.5, 1 / 3, math.inf)


class Moody(Fraction):
    """A number that cannot be compared."""

    def __lt__(self, other: object) -> bool:
        raise ArithmeticError("not today")

    __eq__ = __gt__ = __lt__  # type: ignore[assignment]


def test_hazard_30_numbers_of_a_policys_own_kind_are_taken_as_plain_ones() -> None:
    """The engine thread compares them: what they raise there would end all requests."""
    scheduler = Server(FirstCome()).scheduler
    for number in (3, 1, 2):
        sequence = make_sequence(number, 1)
        sequence.key = checked_key(Own((Moody(number),)), sequence)
        scheduler.add(sequence)
    assert [len(one.admission.prompt_ids) for one in scheduler.waiting] == [1, 2, 3]


def test_a_policy_that_changes_what_it_looks_at_changes_nothing() -> None:
    class Vandal:
        def key(self, sequence: Sequence) -> Key:
            sequence.admission = sequence.sink = None  # type: ignore[assignment]
            return ()

    server = Server(Vandal())
    added = server.add(9)
    assert (len(added.admission.prompt_ids), added.sink is None) == (9, False)
    assert server.rest() == [added]


def test_keys_are_plain_numbers_that_compare_whatever_a_policy_returns() -> None:
    class Unordered(tuple[float, ...]):
        def __lt__(self, other: object) -> bool:
            raise ValueError("no order")

    numbers = (np.uint8(200), np.float16(1.5), 10**400, True)
    key = checked_key(Own(Unordered(numbers)), make_sequence(1, 1))
    assert (type(key), key) == (tuple, (200, 1.5, 10**400, 1))
    assert [type(number) for number in key] == [int, float, int, int]


@pytest.mark.parametrize("policy", ["lottery", "", None, 3, Priority, object(), ["priority"]])
def test_what_is_no_policy_is_refused_with_those_there_are(policy: object) -> None:
    with pytest.raises(ConfigError, match=r"^policy is .*; give 'first-come', 'shortest-prompt', "):
        choose_policy(policy)


@pytest.mark.parametrize("ageing_s", [0, -1.0, math.nan, math.inf, True, "30", None])
def test_an_ageing_time_is_a_finite_number_above_zero(ageing_s: object) -> None:
    with pytest.raises(ConfigError, match=r"^ageing_s is .*; give a finite number of seconds > 0"):
        Priority(ageing_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [None, 3, [1], (1, math.nan), ("a",), (1, None)])
def test_a_key_that_cannot_be_ordered_refuses_its_request(key: object) -> None:
    with pytest.raises(RequestError, match=r"key\(\) of the policy Own returned .*tuple of numb"):
        checked_key(Own(key), make_sequence(1, 1))


def test_a_policy_that_raises_refuses_its_request() -> None:
    with pytest.raises(RequestError, match=r"policy Own raised ZeroDivisionError") as raised:
        checked_key(Own(lambda: 1 // 0), make_sequence(1, 1))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
