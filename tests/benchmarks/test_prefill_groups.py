"""How many requests share a prefill step."""

from __future__ import annotations

import pytest

from benchmarks.common.prefill_groups import prefill_groups
from photon_ext.observe.cost_model import Turnover, Workload, steps_per_request

SIZES = [(1, 20), (8, 20), (16, 30), (32, 110), (4, 1), (500, 110)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("streams", "length"), SIZES)
def test_prefill_steps_have_as_many_requests_as_there_are(
    depth: int, streams: int, length: float
) -> None:
    """Shares, and their mean is the requests by the steps; who ends in the prefill itself, one in
    L, is left out of groups."""
    for turnover in Turnover:
        work = Workload(streams, length, turnover)
        groups = prefill_groups(work, depth)
        assert sum(groups.values()) == pytest.approx(1)
        mean = sum(requests * share for requests, share in groups.items())
        expected = 1 / steps_per_request(work, depth).prefill
        assert mean == pytest.approx(expected, rel=0.02 + 1.2 / length)


def test_two_requests_share_a_prefill_as_often_as_in_the_loop() -> None:
    """By hand: of 8 rows that end with chance 1/20 each, where one does, so many have company:
    1 - 8 x 0.05 x 0.95^7 / (1 - 0.95^8)."""
    alone = 0.4 * 0.95**7 / (1 - 0.95**8)
    work = Workload(8, 20)
    assert prefill_groups(work, 1)[1] == pytest.approx(alone)
    assert prefill_groups(work, 2)[1] < alone, "who ends in two steps shares one"
