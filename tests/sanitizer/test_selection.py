"""Which tests run under compute-sanitizer."""

from __future__ import annotations

import re
from itertools import chain, product
from pathlib import Path

import pytest

from tests.few_cases import HOPPER, PAIRS, Case
from tests.sanitizer import run
from tests.sanitizer.selection import FIRST, LEFT_OUT, selected, shard


def cases(function: str, **values: list[object]) -> list[Case]:
    """Every combination, as pytest collects them."""
    made = [
        dict(zip(values, map(str, chosen), strict=True)) for chosen in product(*values.values())
    ]
    return [
        Case(f"tests/test_x.py::{function}[{'-'.join(case.values())}]", function, case)
        for case in made
    ]


def values_of(names: list[str]) -> list[tuple[str, ...]]:
    return [tuple(name.partition("[")[2].rstrip("]").split("-")) for name in names]


PAIR = sorted(PAIRS)[0]


def test_every_pair_of_values_is_there_in_few_cases() -> None:
    kept = values_of(
        selected(cases(PAIR, lines=[1, 8, 9], shape=["a", "b", "c", "d"], bias=[True, False]))
    )
    assert {(line, shape) for line, shape, _ in kept} == set(product("189", "abcd"))
    assert {(line, bias) for line, _, bias in kept} == set(product("189", ["True", "False"]))
    assert {(shape, bias) for _, shape, bias in kept} == set(product("abcd", ["True", "False"]))
    assert len(kept) < 3 * 4 * 2


def test_other_functions_keep_every_value_only() -> None:
    kept = values_of(selected(cases("test_x", head_dim=[64, 96, 128], group=[1, 3, 7])))
    assert len(kept) == 3
    assert [set(column) for column in zip(*kept, strict=True)] == [
        {"64", "96", "128"},
        {"1", "3", "7"},
    ]


def test_hopper_kernels_keep_their_own_pairs_in_their_own_dtype() -> None:
    given = cases(
        PAIR,
        hopper=[False, True],
        tokens=[1, 9],
        shape=["a", "b"],
        dtype=["torch.float32", "torch.bfloat16"],
    )
    kept = values_of(selected(given))
    hopper = [rest for is_hopper, *rest in kept if is_hopper == "True"]
    portable = [rest for is_hopper, *rest in kept if is_hopper == "False"]
    assert hopper == [[*pair, "torch.bfloat16"] for pair in product("19", "ab")]
    assert len(portable) == 2
    assert {dtype for *_, dtype in portable} == {"torch.float32"}


def test_some_functions_are_cut_short_or_left_out() -> None:
    seeds = cases("test_publish_equals_the_reference", seed=list(range(40)))
    assert selected(seeds) == [
        case.name for case in seeds[: FIRST["test_publish_equals_the_reference"]]
    ]
    assert selected(cases(sorted(LEFT_OUT)[0], n=[1, 2])) == []


def test_a_test_without_parameters_runs_and_order_stays() -> None:
    alone = Case("tests/test_x.py::test_alone", "test_alone", {"device": "cuda"})
    pair = cases("test_x", n=[2, 1])
    assert selected([alone, *pair]) == [alone.name, *(case.name for case in pair)]


def test_shards_deal_out_everything_once() -> None:
    names = [str(i) for i in range(11)]
    parts = [shard(names, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(chain.from_iterable(parts), key=int) == names
    assert {len(part) for part in parts} == {2, 3}
    for wrong in ("0/4", "5/4", "1", "a/b", ""):
        with pytest.raises(ValueError, match="NUMBER/COUNT"):
            shard(names, wrong)


def test_the_functions_and_the_parameter_named_are_there() -> None:
    """A test that is renamed would silently be run at full length, and with another name of the
    parameter the Hopper kernels would be left out.
    """
    files = [Path(run.ROOT, test.partition("::")[0]).read_text() for test in run.TESTS]
    for kernel in ("fused_linear", "filter", "mixed_attention"):
        text = Path(run.ROOT, f"tests/ops/test_{kernel}.py").read_text()
        assert re.search(rf"\b{HOPPER}: bool\b", text), kernel
    for name in (*PAIRS, *LEFT_OUT, *FIRST):
        assert any(f"def {name}(" in text for text in files), name
