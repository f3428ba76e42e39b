"""A request is checked whole before a row is taken: what cannot be served costs nobody anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from photon_ext.errors import RequestError
from photon_ext.runtime import Pipeline
from photon_ext.testing import SimRuntime, ToyForward

GOOD: dict[str, Any] = {"prompt_ids": [1, 2, 3], "max_new_tokens": 4, "pages": [1, 2, 3]}


@pytest.fixture
def runtime() -> SimRuntime:
    return SimRuntime(max_rows=2, max_len=12, page_size=4)


@pytest.fixture
def pipeline(runtime: SimRuntime) -> Pipeline:
    return Pipeline(runtime, ToyForward(runtime), vocab_size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": None}, "prompt_ids is None; a sequence of integers is needed"),
        ({"prompt_ids": [1.5]}, "an entry of prompt_ids is 1.5; an integer is needed"),
        ({"prompt_ids": [-1]}, "prompt_ids contains -1"),
        ({"prompt_ids": [10**9]}, "prompt_ids contains 1000000000"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; an integer is needed"),
        ({"max_new_tokens": 11}, "exceed the context of 12"),
        ({"max_new_tokens": 2**33}, "max_new_tokens 8589934592 exceed the context of 12"),
        ({"stop_ids": None}, "stop_ids is None; a sequence of integers is needed"),
        ({"stop_ids": 3}, "stop_ids is 3; a sequence of integers is needed"),
        ({"stop_ids": ["x"]}, "an entry of stop_ids is 'x'"),
        ({"stop_ids": range(30)}, "30 stop ids given"),
        ({"temperature": 1e300}, "temperature is 1e\\+300"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"pages": None}, "pages are missing"),
        ({"pages": 3}, "pages is 3; a sequence of integers is needed"),
        ({"pages": [1]}, "1 pages given; this request needs 2"),
        ({"pages": [-1, 1]}, "pages contains -1; pages are numbered from 0 on"),
        ({"pages": [1, 2**31]}, "pages contains 2147483648"),
        ({"pages": [1, 1]}, "names a page twice"),
    ],
)
def test_a_bad_request_is_refused_and_takes_no_row(
    runtime: SimRuntime, pipeline: Pipeline, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.admit(**{**GOOD, **change})
    assert runtime.table.free_rows == 2
    assert not pipeline.busy


def test_the_context_can_be_filled_to_its_last_place(pipeline: Pipeline) -> None:
    row = pipeline.admit([1, 2, 3], max_new_tokens=10, pages=[1, 2, 3])
    tokens = 0
    while pipeline.busy:
        tokens += sum(event.token is not None for event in pipeline.tick())
    assert tokens == row.committed


def test_what_a_generator_of_ids_raises_is_its_own(runtime: SimRuntime, pipeline: Pipeline) -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise TypeError("not ours")

    with pytest.raises(TypeError, match="not ours"):
        pipeline.admit(**{**GOOD, "prompt_ids": ids()})
    assert runtime.table.free_rows == 2
