"""Deadlines: whose has passed, each once, and nobody who has ended."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.scheduling import Deadlines
from photon_ext.scheduling.deadlines import FEW
from tests.scheduling.sequences import make_sequence


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 9)), max_size=20),
)
def test_everyone_is_told_once_at_the_first_look_at_or_after_its_deadline(
    requests: list[tuple[int, int, int]],
) -> None:
    """Each comes at some time, and may end by itself before its deadline has passed."""
    clock = Clock()
    deadlines, sequences, told = Deadlines(clock), {}, {}
    for index, (delay, comes, _) in enumerate(requests):
        sequences[index] = make_sequence(1, 1, deadline=float(comes + delay))
    for now in range(25):
        clock.now = float(now)
        for index, (_, comes, ends_after) in enumerate(requests):
            if comes == now:
                deadlines.add(sequences[index])
            if comes + ends_after == now:
                sequences[index].ended = True
        for sequence in deadlines.passed():
            sequence.ended = True
            index = next(i for i, each in sequences.items() if each is sequence)
            assert index not in told
            told[index] = now
    for index, (delay, comes, ends_after) in enumerate(requests):
        assert told.get(index) == (comes + delay if ends_after > delay else None)
    assert len(deadlines) == 0


def test_who_has_none_is_not_looked_at() -> None:
    deadlines = Deadlines(lambda: pytest.fail("the clock is read"))
    deadlines.add(make_sequence(1, 1))
    assert len(deadlines) == 0
    assert list(deadlines.passed()) == []


def test_of_those_that_have_ended_nothing_is_kept_in_front_of_the_next() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    first, second = (make_sequence(1, 1, deadline=deadline) for deadline in (4.0, 6.0))
    deadlines.add(second)
    deadlines.add(first)
    first.ended = True
    clock.now = 1.0
    assert list(deadlines.passed()) == []
    assert len(deadlines) == 1
    clock.now = 9.0
    assert list(deadlines.passed()) == [second]
    assert len(deadlines) == 0


def test_those_that_end_long_before_their_deadline_do_not_pile_up() -> None:
    deadlines, live = Deadlines(lambda: 0.0), [make_sequence(1, 1, deadline=1e9) for _ in range(9)]
    for sequence in live:
        deadlines.add(sequence)
    for _ in range(50 * FEW):
        brief = make_sequence(1, 1, deadline=1e6)
        deadlines.add(brief)
        brief.ended = True
        assert len(deadlines) <= FEW
    deadlines.clock = lambda: math.inf
    assert set(deadlines.passed()) == set(live)
