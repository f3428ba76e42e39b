"""Which cases of a test function are few and hold every value."""

from __future__ import annotations

from itertools import product

import pytest

from tests.few_cases import PAIRS, Case, cover, few


def cases(function: str, **values: str) -> list[Case]:
    """Every combination of the letters given, as pytest collects them."""
    return [
        Case(
            f"tests/test_x.py::{function}[{''.join(one)}]",
            function,
            dict(zip(values, one, strict=True)),
        )
        for one in product(*values.values())
    ]


def ids(names: list[str]) -> list[str]:
    return [name.partition("[")[2].rstrip("]") for name in names]


def with_hopper(cases: list[Case], value: str) -> list[Case]:
    return [
        Case(f"{case.name[:-1]}{value[0]}]", case.function, {**case.values, "hopper": value})
        for case in cases
    ]


def test_every_value_is_there_and_no_case_is_that_the_others_make_up_for() -> None:
    assert ids(few(cases("test_x", a="123", b="xy"))) == ["1x", "2y", "3x"]


def test_hopper_kernels_and_portable_ones_each_have_every_value() -> None:
    given = cases("test_x", a="123", b="xyz")
    found = ids(few([*with_hopper(given, "False"), *with_hopper(given, "True")]))
    for kernels in "FT":
        own = [one for one in found if one.endswith(kernels)]
        assert ({one[0] for one in own}, {one[1] for one in own}) == ({*"123"}, {*"xyz"})
        assert len(own) == 3


def test_where_pairs_are_kernels_every_pair_is_there() -> None:
    found = ids(few(cases(sorted(PAIRS)[0], a="12", b="xy", c="pqr")))
    for at in ((0, 1), (0, 2), (1, 2)):
        every = {*product(*(["12", "xy", "pqr"][i] for i in at))}
        assert {tuple(one[i] for i in at) for one in found} == every
    assert len(found) < 12


def test_functions_are_told_apart_and_the_order_stays() -> None:
    alone = Case("tests/test_x.py::test_alone", "test_alone", {})
    given = [*cases("test_x", a="21"), alone, *cases("test_y", a="1")]
    assert few(given) == [case.name for case in given]


@pytest.mark.parametrize("together", [1, 2])
def test_cases_whose_values_occur_once_are_all_kept(together: int) -> None:
    """Of pairs that were given as pairs none stands for another."""
    given = [Case(f"x[{i}]", "x", {"text": f"t{i}", "expected": f"e{i}"}) for i in range(4)]
    assert cover(given, together) == [case.name for case in given]


def test_no_cases_are_none() -> None:
    assert few([]) == []
