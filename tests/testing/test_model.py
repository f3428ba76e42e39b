"""The toy model and its noise."""

from __future__ import annotations

import math

import pytest

from photon_ext.errors import RequestError
from photon_ext.testing import Driver, Request, SimRuntime, ToyModel
from photon_ext.testing.model import pick
from photon_ext.testing.noise import gumbel, philox4x32

ONES = 0xFFFFFFFF


def test_philox_gives_the_known_answers() -> None:
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ONES,) * 4, (ONES, ONES)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)  # type: ignore[arg-type]


def test_noise_has_the_moments_of_a_gumbel() -> None:
    values = [gumbel(1, 2, position, token) for position in range(50) for token in range(50)]
    mean = sum(values) / len(values)
    assert abs(mean - 0.5772) < 0.1
    assert abs(sum((value - mean) ** 2 for value in values) / len(values) - math.pi**2 / 6) < 0.2


def test_ties_go_to_the_lowest_id_and_nan_is_no_candidate() -> None:
    assert pick([1.0, 3.0, 3.0], 0.0, 0, 0, 0) == 1
    assert pick([math.nan, -math.inf, 2.0], 0.0, 0, 0, 0) == 2
    assert pick([1.0, math.inf, 2.0], 0.0, 0, 0, 0) == 1
    assert pick([math.nan, -math.inf], 0.0, 0, 0, 0) == -1
    assert pick([math.nan, -math.inf], 1.0, 0, 0, 0) == -1


def test_every_token_of_the_context_changes_the_logits() -> None:
    model = ToyModel(32)
    base = model.logits([1, 2, 3, 4])
    for other in ([1, 2, 3], [1, 2, 4, 3], [0, 2, 3, 4], [1, 2, 3, 5], [1, 1, 2, 3, 4]):
        assert model.logits(other) != base
    assert ToyModel(32, seed=1).logits([1, 2, 3, 4]) != base
    assert model.logits([1, 2, 3, 4]) == base


def test_generate_ends_at_a_stop_a_cap_or_a_constraint_that_allows_nothing() -> None:
    model = ToyModel(32)
    free = model.generate(Request((1, 2), 6))
    assert len(free) == 6
    assert (
        model.generate(Request((1, 2), 6, stop_ids=(free[2],))) == free[: free.index(free[2]) + 1]
    )
    assert model.generate(
        Request((1, 2), 6, allowed=lambda tokens: (3,) if len(tokens) < 2 else ())
    ) == (3, 3)
    assert model.generate(Request((1, 2), 6, temperature=1.0, seed=1)) != model.generate(
        Request((1, 2), 6, temperature=1.0, seed=2)
    )


def test_a_request_that_no_pool_of_this_size_can_hold_is_refused() -> None:
    driver = Driver(SimRuntime(page_size=4, max_len=64), pages=2)
    with pytest.raises(
        RequestError, match="needs 3 pages and the pool has 2; make the Driver with more"
    ):
        driver.submit(Request((1, 2, 3, 4, 5, 6), 5))
    assert len(driver.run(Request((1, 2, 3), 4))[0]) == 4
