"""How long requests took, as the meter counts it where they end."""

from __future__ import annotations

import pytest

from photon_ext.observe.request_meter import BOUNDS, Life, RequestMeter


def counted(meter: RequestMeter, name: str) -> tuple[int, float]:
    """How many values, and their sum."""
    counts, total = meter.histograms()[name]
    assert len(counts) == len(BOUNDS[name]) + 1
    return sum(counts), total


def test_a_life_is_counted_by_its_parts() -> None:
    meter = RequestMeter()
    meter.add(Life("stop", 1.0, 1.5, 2.0, 3.0, 7, 5))
    assert meter.ends() == {"stop": 1}
    expected = {
        "first_token_s": (1, 1.0),
        "between_tokens_s": (4, 1.0),
        "token_s": (1, 0.25),
        "whole_s": (1, 2.0),
        "queue_s": (1, 0.5),
        "prefill_s": (1, 0.5),
        "decode_s": (1, 1.0),
        "in_row_s": (1, 1.5),
        "prompt_tokens": (1, 7.0),
        "tokens": (1, 5.0),
    }
    assert {name: counted(meter, name) for name in BOUNDS} == expected


def test_what_a_request_never_came_to_is_not_counted() -> None:
    meter = RequestMeter()
    meter.add(Life("cancelled", 1.0, None, None, 3.0, 7, 0))
    meter.add(Life("error", 1.0, 2.0, None, 3.0, 7, 0))
    assert counted(meter, "queue_s") == (2, 3.0)
    assert counted(meter, "in_row_s") == (1, 1.0)
    assert counted(meter, "first_token_s") == (0, 0.0)
    assert meter.ends() == {"cancelled": 1, "error": 1}


def test_the_time_in_a_row_is_that_of_late() -> None:
    meter = RequestMeter()
    assert meter.recent_row_s == 0.0
    for seconds in (1.0, 3.0):
        meter.add(Life("stop", 0.0, 5.0, 5.5, 5.0 + seconds, 1, 1))
    assert meter.recent_row_s == pytest.approx(2.0)
    meter.add(Life("cancelled", 0.0, None, None, 100.0, 1, 0))
    assert meter.recent_row_s == pytest.approx(2.0)
    for _ in range(100):
        meter.add(Life("stop", 0.0, 5.0, 5.5, 15.0, 1, 1))
    assert meter.recent_row_s == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize(("seconds", "place"), [(0.0, 0), (0.001, 0), (0.0011, 1), (1e9, -1)])
def test_a_bound_belongs_to_its_bucket(seconds: float, place: int) -> None:
    meter = RequestMeter()
    meter.add(Life("stop", 0.0, 0.0, seconds, seconds, 1, 1))
    assert meter.histograms()["first_token_s"][0][place] == 1
