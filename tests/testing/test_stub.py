"""The stub runtime under the real pipeline: it says what a device would, and computes nothing."""

from __future__ import annotations

import pytest

from photon_ext.testing import Driver, Request, check_invariants
from photon_ext.testing.stub import StubDevice

TOKEN = 5


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_end_at_their_caps_with_the_stub_s_token(depth: int) -> None:
    driver = Driver(StubDevice(2, 64, depth, page_size=4), pages=32, forward=lambda step: None)
    asked = [Request((1,) * prompt, cap) for prompt, cap in ((1, 1), (30, 7), (9, 20), (3, 2))]
    caps = [request.params.max_new_tokens for request in asked]
    assert driver.run(*asked) == [(TOKEN,) * cap for cap in caps]
    assert len(driver.free_pages) == 32
    check_invariants(driver.pipeline)


def test_a_row_that_is_aborted_is_released() -> None:
    runtime = StubDevice(1, 64)
    driver = Driver(runtime, pages=8, forward=lambda step: None)
    outcome = driver.submit(Request((1, 2), 40))
    for _ in range(4):
        driver.tick()
    driver.cancel(outcome)
    while driver.busy:
        driver.tick()
    assert (outcome.released, runtime.table.free_rows) == (True, 1)
