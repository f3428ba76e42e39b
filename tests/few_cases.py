"""Few of the cases of a test function that together hold every value of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, groupby
from typing import NamedTuple

import pytest

HOPPER = "hopper"  # the tests' parameter that chooses between Hopper and portable kernels

# Functions whose pairs of values are kernels of their own: every pair of values runs, elsewhere
# every value.
PAIRS = frozenset(
    {
        "test_fast_decode_is_near_the_float64_reference",
        "test_results_are_near_the_float64_reference",
    }
)


class Case(NamedTuple):
    """A test: its id, its function's name, and what its parameters are, as text."""

    name: str
    function: str
    values: Mapping[str, str]

    @classmethod
    def of(cls, item: pytest.Item) -> Case:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        return cls(
            item.nodeid,
            getattr(item, "originalname", item.name),
            {name: str(value) for name, value in values.items()},
        )


def is_hopper(case: Case) -> bool:
    return case.values.get(HOPPER) == "True"


def by_function(cases: Iterable[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Each function's name and its cases, which stand together."""
    for (_, function), group in groupby(
        cases, key=lambda case: (case.name.partition("[")[0], case.function)
    ):
        yield function, list(group)


def few(cases: Iterable[Case]) -> list[str]:
    """The names of few cases of each function, in the order given: every value on the Hopper
    kernels and on the portable ones, of PAIRS every pair.
    """
    names: list[str] = []
    for function, group in by_function(cases):
        together = 2 if function in PAIRS else 1
        kept = {
            *cover([case for case in group if is_hopper(case)], together),
            *cover([case for case in group if not is_hopper(case)], together),
        }
        names += [case.name for case in group if case.name in kept]
    return names


def cover(cases: list[Case], together: int) -> list[str]:
    """Few of the cases that hold every value, and every combination of `together` parameters'
    values, that any case holds.
    """
    held = [_combinations(case, together) for case in cases]
    missing = {part for parts in held for part in parts}
    taken: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(held[i] & missing))
        taken.add(best)
        missing -= held[best]
    return [case.name for i, case in enumerate(cases) if i in taken]


def _combinations(case: Case, together: int) -> frozenset[tuple[tuple[str, str], ...]]:
    values = sorted(case.values.items())
    return frozenset(combinations(values, min(together, len(values))))
