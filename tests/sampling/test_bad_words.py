"""What bad words come to, and what of a mask they leave."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.errors import RequestError
from photon_ext.sampling import from_allowed_ids, from_callable
from photon_ext.sampling.bad_words import BadWords, Endings, WithoutSequences

IDS = {"a": 0, "b": 1, " ": 2, "ab": 3, " b": 4, "c": 5}


def encode(text: str) -> list[int]:
    """The longest piece first."""
    ids = []
    while text:
        piece = max((piece for piece in IDS if text.startswith(piece)), key=len)
        ids.append(IDS[piece])
        text = text[len(piece) :]
    return ids


def found(words: list[str]) -> tuple[frozenset[int], frozenset[tuple[int, ...]]]:
    made = BadWords.of(words, encode)
    return made.ids, made.sequences


def allowed(constraint: WithoutSequences, words: int = 2) -> set[int]:
    mask = memoryview(bytearray(4 * words)).cast("i")
    constraint.fill_bitmask(mask)
    return {i for i in range(32 * words) if mask[i >> 5] >> (i & 31) & 1}


def test_texts_of_one_token_are_ids_and_others_are_sequences() -> None:
    assert found(["b"]) == ({1, 4}, set())
    assert found(["ab"]) == ({3}, set())  # behind a space it holds a banned one
    assert found(["ca"]) == (set(), {(5, 0), (2, 5, 0)})
    assert found(["ca", "c"]) == ({5}, set())
    assert found([]) == (set(), set())


def test_the_last_token_is_left_out_behind_the_others_alone() -> None:
    constraint, every = (
        WithoutSequences(Endings([(7, 8, 9), (8, 31), (40, 63)]), None),
        set(range(64)),
    )
    assert allowed(constraint) == every
    for token, left_out in ((8, {31}), (7, set()), (8, {9, 31}), (8, {31}), (40, {63}), (1, set())):
        constraint.advance(token)
        assert allowed(constraint) == every - left_out, token
    assert not constraint.finished
    constraint.advance(40)
    assert allowed(constraint, 1) == set(range(32)), "an id without a bit is none of the model"


def test_a_token_that_repeats_is_found_where_it_begins_again() -> None:
    constraint = WithoutSequences(Endings([(5, 5, 6)]), None)
    for _ in range(3):
        constraint.advance(5)
    assert 6 not in allowed(constraint)


def test_another_constraint_says_what_else_may_come_and_when_it_is_finished() -> None:
    constraint = WithoutSequences(Endings([(1, 2)]), from_allowed_ids([[1], [2, 3]]))
    assert allowed(constraint) == {1}
    constraint.advance(1)
    assert (allowed(constraint), constraint.finished) == ({3}, False)
    constraint.advance(3)
    assert constraint.finished


def test_what_another_constraint_raises_is_raised() -> None:
    constraint = WithoutSequences(Endings([(1, 2)]), from_callable(lambda tokens: [-1]))
    with pytest.raises(RequestError, match="allows token id -1"):
        allowed(constraint)


def test_a_token_costs_the_same_however_many_sequences_hold_it() -> None:
    """Thousands of words with one middle token made each token of an unrelated request dearer by
    milliseconds: all of them were looked at wherever the answer had that token.
    """

    def calls(count: int) -> int:
        words = [(100 + i, 7, 100 + i) for i in range(count)]
        return calls_of(WithoutSequences(Endings(words), None), [7, 5] * 20)

    assert calls(5400) == calls(2)


def calls_of(constraint: WithoutSequences, tokens: list[int]) -> int:
    """How many lines of Python run while the tokens are taken and each gets its mask."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    mask = memoryview(bytearray(4 * 400)).cast("i")
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token in tokens:
            constraint.advance(token)
            constraint.fill_bitmask(mask)
    finally:
        sys.settrace(before)
    return count


def test_many_last_tokens_are_left_out_at_once_and_so_are_those_of_shorter_beginnings() -> None:
    many = {*range(3, 120, 2)}
    constraint = WithoutSequences(
        Endings([(1, 2, last) for last in many] + [(2, 64), (9, 1)]), None
    )
    for token in (9, 1, 2):
        constraint.advance(token)
    assert allowed(constraint, 4) == {*range(128)} - many - {64}


SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=5), max_size=8)


@given(SEQUENCES, st.lists(st.integers(0, 3), max_size=12))
def test_what_is_left_out_is_what_looking_at_each_sequence_finds(
    sequences: list[list[int]], answer: list[int]
) -> None:
    constraint = WithoutSequences(Endings(map(tuple, sequences)), None)
    for i in range(len(answer) + 1):
        said = answer[:i]
        left_out = {
            s[-1] for s in sequences if len(s) <= i + 1 and said[i + 1 - len(s) :] == s[:-1]
        }
        assert allowed(constraint, 1) == {*range(32)} - left_out
        if i < len(answer):
            constraint.advance(answer[i])
