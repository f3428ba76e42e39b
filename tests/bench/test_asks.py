"""Lengths, and requests by the clock."""

from __future__ import annotations

import statistics

import pytest

from photon_ext.bench.asks import Lengths, Traffic
from photon_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("160", (160, 160, None)), ("3-9", (3, 9, None)), ("16-2048:160", (16, 2048, 160))],
)
def test_lengths(text: str, lengths: tuple[int, int, int | None]) -> None:
    assert Lengths.of("--prompt", text) == lengths


@pytest.mark.parametrize("text", ["", "0", "9-3", "-3", "1.5", "3-9:10", "3-9:2", "3:", "many"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt is"):
        Lengths.of("--prompt", text)


def test_requests() -> None:
    traffic = Traffic(Lengths(2, 2048, 160), Lengths(5, 5), (10, 20))
    asks = traffic.asks(4000, 50.0)
    assert asks == traffic.asks(4000, 50.0)
    assert asks[0].prompt != traffic.asks(1, 50.0, run=1)[0].prompt
    assert all(10 <= one < 20 for ask in asks for one in ask.prompt if isinstance(one, int))
    assert statistics.median(len(ask.prompt) for ask in asks) == pytest.approx(160, rel=0.1)
    assert asks[-1].due_s == pytest.approx(80, rel=0.1)
    assert {ask.due_s for ask in traffic.asks(9)} == {0.0}


def test_prompts_of_words() -> None:
    (ask,) = Traffic(Lengths(12, 12), Lengths(5, 5), None).asks(1)
    assert isinstance(ask.prompt, str)
    assert len(ask.prompt.split()) == 12
