"""Constraints: the bits they set, their order, and their ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.errors import ConfigError, RequestError
from photon_ext.sampling import Constraint, from_allowed_ids, from_callable, set_ids
from photon_ext.sampling.constraints import pack_ids

WORDS = 4


def allowed_by(constraint: Constraint, num_words: int = WORDS) -> set[int]:
    words = memoryview(bytearray(4 * num_words)).cast("i")
    constraint.fill_bitmask(words)
    return {token for token in range(32 * num_words) if words[token >> 5] >> (token & 31) & 1}


@given(st.sets(st.integers(0, 32 * WORDS - 1)))
def test_exactly_the_bits_of_the_ids_are_set(ids: set[int]) -> None:
    assert allowed_by(from_allowed_ids(ids)) == ids


def test_ids_are_allowed_besides_those_that_are() -> None:
    words = memoryview(bytearray(4 * WORDS)).cast("i")
    set_ids(words, [0, 31])
    set_ids(words, iter([32 * WORDS - 1]))
    assert words.tolist() == [1 - (1 << 31), 0, 0, -(1 << 31)]
    with pytest.raises(RequestError, match="token id 128; the mask covers ids 0 to 127"):
        set_ids(words, [1, 128])


@pytest.mark.parametrize(
    ("token", "named"),
    [(32 * WORDS, "128"), (-1, "-1"), (10**5000, "an integer of 16610 bits")],
    ids=["beyond", "negative", "huge"],
)
def test_an_id_outside_the_mask_is_named(token: int, named: str) -> None:
    with pytest.raises(RequestError, match=f"token id {named}; the mask covers"):
        pack_ids([token], WORDS)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([3, 1.5], r"constraint allows 1\.5, which is no token id; give integers"),
        (["a"], "constraint allows 'a', which is no token id; give integers"),
        (None, "constraint allows None; give a list of token ids"),
        (7, "constraint allows 7; give a list of token ids"),
    ],
)
def test_what_a_function_gives_in_place_of_ids_is_named(ids: object, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        allowed_by(from_callable(lambda tokens: ids))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_ids_may_be_numpy_s(dtype: type) -> None:
    ids = np.array([5, 100], dtype)
    assert allowed_by(from_allowed_ids(ids)) == {5, 100}
    assert allowed_by(from_allowed_ids([ids, [1]])) == {5, 100}
    assert allowed_by(from_callable(lambda tokens: ids)) == {5, 100}


def test_plain_ids_hold_at_every_position_and_never_finish() -> None:
    constraint = from_allowed_ids([3, 70])
    for _ in range(3):
        assert allowed_by(constraint) == {3, 70}
        constraint.advance(3)
        assert not constraint.finished


def test_a_list_of_sets_is_one_set_per_position_and_then_finished() -> None:
    constraint = from_allowed_ids([{1, 2}, [3], (4, 5)])
    seen = []
    while not constraint.finished:
        seen.append(allowed_by(constraint))
        constraint.advance(min(seen[-1]))
    assert seen == [{1, 2}, {3}, {4, 5}]


def test_fresh_starts_over_and_leaves_the_original_alone() -> None:
    constraint = from_allowed_ids([{1}, {2}])
    constraint.advance(1)
    fresh = constraint.fresh()
    assert allowed_by(fresh) == {1}
    assert allowed_by(constraint) == {2}


@pytest.mark.parametrize("ids", [{1, 40}, [{1, 40}, {2}]])
def test_one_constraint_serves_engines_of_different_vocabularies(ids: object) -> None:
    constraint = from_allowed_ids(ids)
    for num_words in (WORDS, WORDS + 3, 2):
        assert allowed_by(constraint.fresh(), num_words) == {1, 40}


@pytest.mark.parametrize(
    "bad", [[1, {2}], ["a"], [[1, "b"]], [-1], [True], [[[1]]], [[1], 10**5000, "a"]]
)
def test_mixed_or_foreign_items_are_refused(bad: list[object]) -> None:
    with pytest.raises(ConfigError, match="from_allowed_ids: item"):
        from_allowed_ids(bad)


@pytest.mark.parametrize("bad", [None, 5, "ab", b"ab"])
def test_what_holds_no_ids_is_refused(bad: object) -> None:
    with pytest.raises(
        ConfigError, match=f"from_allowed_ids: got a {type(bad).__name__}; give token ids"
    ):
        from_allowed_ids(bad)


def test_a_callable_is_asked_with_the_tokens_so_far() -> None:
    asked: list[list[int]] = []

    def allowed(tokens: list[int]) -> list[int]:
        asked.append(tokens)
        return [len(tokens)]

    constraint = from_callable(allowed, finished=lambda tokens: len(tokens) == 2)
    assert allowed_by(constraint) == {0}
    constraint.advance(0)
    assert allowed_by(constraint) == {1}
    assert not constraint.finished
    constraint.advance(1)
    assert constraint.finished
    assert asked == [[], [0]]
    assert allowed_by(constraint.fresh()) == {0}


def test_from_callable_wants_functions() -> None:
    with pytest.raises(ConfigError, match="from_callable"):
        from_callable([1, 2])
