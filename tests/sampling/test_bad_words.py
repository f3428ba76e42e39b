"""What bad words come to, and what of a mask they leave."""

from __future__ import annotations

import pytest

from photon_ext.errors import RequestError
from photon_ext.sampling import from_allowed_ids, from_callable
from photon_ext.sampling.bad_words import BadWords, WithoutSequences

IDS = {"a": 0, "b": 1, " ": 2, "ab": 3, " b": 4, "c": 5}


def encode(text: str) -> list[int]:
    """The longest piece first."""
    ids = []
    while text:
        piece = max((piece for piece in IDS if text.startswith(piece)), key=len)
        ids.append(IDS[piece])
        text = text[len(piece) :]
    return ids


def allowed(constraint: WithoutSequences, words: int = 2) -> set[int]:
    mask = memoryview(bytearray(4 * words)).cast("i")
    constraint.fill_bitmask(mask)
    return {i for i in range(32 * words) if mask[i >> 5] >> (i & 31) & 1}


def test_texts_of_one_token_are_ids_and_others_are_sequences() -> None:
    assert BadWords.of(["b"], encode) == ({1, 4}, set())
    assert BadWords.of(["ab"], encode) == ({3}, set())  # behind a space it holds a banned one
    assert BadWords.of(["ca"], encode) == (set(), {(5, 0), (2, 5, 0)})
    assert BadWords.of(["ca", "c"], encode) == ({5}, set())
    assert BadWords.of([], encode) == (set(), set())


def test_the_last_token_is_left_out_behind_the_others_alone() -> None:
    constraint, every = WithoutSequences([(7, 8, 9), (8, 31), (40, 63)], None), set(range(64))
    assert allowed(constraint) == every
    for token, left_out in ((8, {31}), (7, set()), (8, {9, 31}), (8, {31}), (40, {63}), (1, set())):
        constraint.advance(token)
        assert allowed(constraint) == every - left_out, token
    assert not constraint.finished
    constraint.advance(40)
    assert allowed(constraint, 1) == set(range(32)), "an id without a bit is none of the model"


def test_a_token_that_repeats_is_found_where_it_begins_again() -> None:
    constraint = WithoutSequences([(5, 5, 6)], None)
    for _ in range(3):
        constraint.advance(5)
    assert 6 not in allowed(constraint)


def test_another_constraint_says_what_else_may_come_and_when_it_is_finished() -> None:
    constraint = WithoutSequences([(1, 2)], from_allowed_ids([[1], [2, 3]]))
    assert allowed(constraint) == {1}
    constraint.advance(1)
    assert (allowed(constraint), constraint.finished) == ({3}, False)
    constraint.advance(3)
    assert constraint.finished


def test_what_another_constraint_raises_is_raised() -> None:
    constraint = WithoutSequences([(1, 2)], from_callable(lambda tokens: [-1]))
    with pytest.raises(RequestError, match="allows token id -1"):
        allowed(constraint)
