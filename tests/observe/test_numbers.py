"""The one percentile that meter, report and benchmarks share."""

from __future__ import annotations

import pytest

from photon_ext.observe.numbers import percentile


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (1, 0.99, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (99, 0.99, 99),
        (100, 0.99, 99),
        (101, 0.99, 100),
        (1000, 0.99, 990),
        (100, 0.07, 7),
        (5, 0, 1),
        (5, 1, 5),
    ],
)
def test_a_percentile_is_the_value_of_the_nearest_rank(
    count: int, share: float, expected: int
) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert percentile(values, share) == expected
    assert values[0] == count, "the values are left as they are"
