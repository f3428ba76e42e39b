"""What a row is admitted with, checked whole before anything is taken: a request that cannot be
served costs nobody anything.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from photon_ext.errors import RequestError
from photon_ext.runtime.arguments import INT32_MAX, as_tuple

MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 1e4


class Limits(NamedTuple):
    """What a runtime can hold per row."""

    vocab_size: int
    max_len: int
    page_size: int
    pages_per_row: int
    max_stop_ids: int


class Admission(NamedTuple):
    """A request that fits. ``pages`` None: the page of the row's index."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    seed: int
    constrained: bool
    pages: tuple[int, ...] | None


def checked_admission(
    limits: Limits,
    prompt_ids: Iterable[int],
    max_new_tokens: int,
    stop_ids: Iterable[int],
    temperature: float,
    seed: int,
    constrained: bool,
    pages: Iterable[int] | None,
) -> Admission:
    """The request as plain, checked numbers.

    Raises RequestError, naming the value and the remedy.
    """
    prompt = _token_ids("prompt_ids", prompt_ids, limits.vocab_size)
    stops = _token_ids("stop_ids", stop_ids, limits.vocab_size)
    new_tokens = _integer("max_new_tokens", max_new_tokens)
    if not prompt:
        raise RequestError(
            "the prompt is empty; give at least one token (a model's beginning-of-text id will do)"
        )
    if new_tokens < 1:
        raise RequestError(f"max_new_tokens is {new_tokens}; ask for at least 1")
    if len(prompt) + new_tokens - 1 > limits.max_len:
        raise RequestError(
            f"prompt of {len(prompt)} tokens and max_new_tokens {new_tokens} exceed the context of "
            f"{limits.max_len}; "
            "shorten one of them, or build the runtime with a larger max_len"
        )
    if len(stops) > limits.max_stop_ids:
        raise RequestError(
            f"{len(stops)} stop ids given; this runtime holds {limits.max_stop_ids} per row "
            "(max_stop_ids)"
        )
    if not isinstance(temperature, (int, float)):
        raise RequestError(f"temperature is {temperature!r}; a number is needed")
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RequestError(
            f"temperature is {temperature}; use 0 for greedy, or a number from {MIN_TEMPERATURE} "
            f"to {MAX_TEMPERATURE:g}"
        )
    held = _pages(pages, len(prompt) + new_tokens - 1, limits)
    return Admission(
        prompt,
        new_tokens,
        stops,
        float(temperature),
        _integer("seed", seed),
        bool(constrained),
        held,
    )


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}; an integer is needed") from None


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """All of them at once: a request may have thousands, and others wait meanwhile."""
    entries = as_tuple(values)
    if entries is None:
        raise RequestError(f"{name} is {values!r}; a sequence of integers is needed")
    try:
        return tuple(map(operator.index, entries))
    except TypeError:
        return tuple(_integer(f"an entry of {name}", one) for one in entries)


def _token_ids(name: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    checked = _integers(name, ids)
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        bad = next(one for one in checked if not 0 <= one < vocab_size)
        raise RequestError(
            f"{name} contains {bad}; token ids of this model lie in [0, {vocab_size})"
        )
    return checked


def _pages(pages: Iterable[int] | None, tokens: int, limits: Limits) -> tuple[int, ...] | None:
    needed = -(-tokens // limits.page_size)
    if pages is None:
        if limits.pages_per_row > 1:
            raise RequestError(
                f"pages are missing: with page_size {limits.page_size} this request needs {needed} "
                "pages"
            )
        return None
    held = _integers("pages", pages)
    if not needed <= len(held) <= limits.pages_per_row:
        raise RequestError(
            f"{len(held)} pages given; this request needs {needed}, and a row holds "
            f"{limits.pages_per_row} at most"
        )
    if not 0 <= min(held) <= max(held) <= INT32_MAX:
        bad = next(page for page in held if not 0 <= page <= INT32_MAX)
        raise RequestError(f"pages contains {bad}; pages are numbered from 0 on, in int32")
    if len(set(held)) < len(held):
        raise RequestError(f"pages {held} names a page twice; each holds other tokens")
    return held
