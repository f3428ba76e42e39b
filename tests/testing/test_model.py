"""The toy model: what its logits depend on, and where its oracle ends."""

from __future__ import annotations

import pytest

from photon_ext.errors import RequestError
from photon_ext.testing import Driver, Request, SimRuntime, ToyModel


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
        model.generate(Request((1, 2), 6, stop_token_ids=(free[2],)))
        == free[: free.index(free[2]) + 1]
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
