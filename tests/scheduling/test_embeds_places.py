"""Places of embeddings: apart, found again, and free once the prompt that needs them is read."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.row_words import prompt_bits
from photon_ext.runtime import Admission, RowParams
from photon_ext.scheduling import PagePool, Pager, RangePool, Sequence
from photon_ext.scheduling.pager import Grant
from tests.scheduling.sequences import Sink

PAGE, PLACES = 4, 12


@given(st.lists(st.one_of(st.integers(1, 5), st.none()), max_size=40), st.randoms())
def test_ranges_are_apart_and_none_is_refused_that_fits(
    moves: list[int | None], rng: random.Random
) -> None:
    pool = RangePool(PLACES)
    held: dict[int, int] = {}
    for count in moves:
        taken = {place for begin, size in held.items() for place in range(begin, begin + size)}
        if count is None:
            if held:
                begin = rng.choice(sorted(held))
                del held[begin]
                pool.release(begin)
        else:
            fitting = [b for b in range(PLACES + 1 - count) if not taken & {*range(b, b + count)}]
            found = pool.allocate(count)
            assert found == (fitting[0] if fitting else None)
            if found is not None:
                held[found] = count
        assert pool.free == PLACES - sum(held.values())


def test_a_range_is_released_once() -> None:
    pool = RangePool(4)
    begin = pool.allocate(3)
    assert begin == 0
    pool.release(begin)
    with pytest.raises(KeyError):
        pool.release(begin)


def sequence_of(*prompt_ids: int) -> Sequence:
    embeds = torch.zeros(sum(token < 0 for token in prompt_ids), 2)
    admission = Admission(prompt_ids, RowParams(max_new_tokens=4))
    return Sequence(admission, None, Sink(), embeds=embeds)


def make_pager(places: int) -> Pager:
    return Pager(PagePool(16), PAGE, embeds=RangePool(places))


def granted(pager: Pager, sequence: Sequence) -> Grant:
    grant = pager.grant(sequence)
    assert grant is not None
    return grant


def test_places_are_free_once_the_prompt_is_read() -> None:
    """So a request that goes on generating does not hold up the next image."""
    pager, first, second = make_pager(4), sequence_of(1, -91, -92, -93, 2), sequence_of(-94, -95)
    grant = granted(pager, first)
    assert grant.place == 0
    assert pager.grant(second) is None
    pager.written(first, 4)
    assert pager.grant(second) is None
    assert pager.refuses(second)
    pager.written(first, 5)
    assert not pager.refuses(second)
    assert granted(pager, second).place == 0
    pager.cancel(first, grant)  # its places are the second's now
    assert pager._embeds.free == 2


def test_who_leaves_before_its_prompt_is_read_gives_its_places_back() -> None:
    pager, first = make_pager(4), sequence_of(1, -91, -92, -93, 2)
    pager.cancel(first, granted(pager, first))
    assert pager._embeds.free == 4


def test_what_waits_for_places_takes_no_page() -> None:
    pager = make_pager(4)
    granted(pager, sequence_of(1, -91, -92, -93))
    held = pager.pool.held
    assert pager.grant(sequence_of(1, -94, -95, -96)) is None
    assert pager.pool.held == held


def test_only_embeddings_behind_cached_pages_take_places() -> None:
    pager, first = make_pager(6), sequence_of(1, -91, -92, -93, -94, -95, 2)
    granted(pager, first)
    pager.written(first, 7)
    again = sequence_of(1, -91, -92, -93, -94, -96, 3, -97)
    grant = granted(pager, again)
    assert (grant.cached, grant.place, pager._embeds.free) == (4, 0, 3)
    assert again.placed(grant.cached, 2).prompt_ids[4:] == (-4, -5, 3, -6)
    whole = sequence_of(1, -91, -92, -93, 7)
    grant = granted(pager, whole)
    assert (grant.cached, grant.place) == (4, None)
    assert whole.placed(4, None) is whole.admission


def test_embeddings_are_no_tokens_of_the_prompt_for_penalties() -> None:
    assert prompt_bits((3, -2, 35, -(2**100)), 64) == prompt_bits((3, 35), 64) == [8, 8]
