"""The stub device under the real pipeline and engine: it says what a device would, and computes
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from photon_ext.engine import Engine
from photon_ext.sampling import SamplingParams
from photon_ext.testing import Driver, Request, StubDevice, check_invariants, stub


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_end_at_their_caps_with_the_stub_s_token(depth: int) -> None:
    driver = Driver(StubDevice(2, 64, depth, page_size=4), pages=32, forward=lambda step: None)
    asked = [Request((1,) * prompt, cap) for prompt, cap in ((1, 1), (30, 7), (9, 20), (3, 2))]
    assert driver.run(*asked) == [(stub.TOKEN,) * request.max_new_tokens for request in asked]
    assert len(driver.free_pages) == 32
    check_invariants(driver.pipeline)


def test_an_engine_serves_on_it() -> None:
    device = StubDevice(4, 64)
    with Engine(device, lambda step: None, vocab_size=32, num_pages=16) as engine:
        outputs = engine.generate([[1, 2]] * 9, SamplingParams(max_new_tokens=11))
    assert [output.token_ids for output in outputs] == [(stub.TOKEN,) * 11] * 9
    assert {output.finish_reason for output in outputs} == {"length"}


def test_a_row_that_is_aborted_is_released() -> None:
    device = StubDevice(1, 64)
    driver = Driver(device, pages=8, forward=lambda step: None)
    outcome = driver.submit(Request((1, 2), 40))
    for _ in range(4):
        driver.tick()
    driver.cancel(outcome)
    while driver.busy:
        driver.tick()
    assert (outcome.released, device.table.free_rows) == (True, 1)


def test_it_stays_small() -> None:
    """What it costs is taken for the host's."""
    assert len(Path(stub.__file__).read_text().splitlines()) <= 80
