"""Checks of what callers give, each written once: the message names the argument, its value and
what to give instead. Nothing is taken before its checks have passed.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Iterable
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from photon_ext.errors import ConfigError, RequestError, shown

Backend: TypeAlias = Literal["hopper", "portable"]
Prefill: TypeAlias = Literal["mixed", "separate"]
KvDtype: TypeAlias = Literal["fp8"]
Activations: TypeAlias = Literal["fp8"]

INT32_MAX = 2**31 - 1  # the device counts rows, positions and tokens in int32


def is_array(value: object) -> bool:
    """Whether it is a torch tensor or a numpy array."""
    makers = (("torch", "Tensor"), ("numpy", "ndarray"))  # who has made one has imported them
    types = (getattr(sys.modules.get(name), kind, None) for name, kind in makers)
    return any(kind is not None and isinstance(value, kind) for kind in types)


def as_index(value: Any) -> int | None:
    """``value`` as an int; None where it is not one, or a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception:  # a TypeError, or what its own __index__ raises
        return None


def as_tuple(values: Any) -> tuple[Any, ...] | None:
    """All of ``values``; None where it cannot be iterated over, or is text or bytes.

    What it raises on the way passes through.
    """
    if type(values) is tuple:
        return values
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        return None
    try:
        iterator = iter(values)
    except TypeError:
        return None
    return tuple(iterator)


def check_count(name: str, value: object, most: int = INT32_MAX, least: int = 1) -> int:
    """``value`` as an int from ``least`` to ``most``. Raises ConfigError."""
    number = as_index(value)
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} is {shown(value)}; give an integer from {least} to {most}")
    return number


def check_counts(name: str, values: object, most: int = INT32_MAX) -> tuple[int, ...]:
    """All of ``values`` as ints from 1 to ``most``. Raises ConfigError."""
    entries = as_tuple(values)
    if entries is None:
        raise ConfigError(f"{name} is {shown(values)}; give a tuple of integers from 1 on")
    return tuple(check_count(f"an entry of {name}", entry, most) for entry in entries)


def check_flag(name: str, value: object, optional: bool = False) -> None:
    """Raises ConfigError unless ``value`` is True or False, or may be None and is."""
    if not (isinstance(value, bool) or (optional and value is None)):
        choices = "True, False or None" if optional else "True or False"
        raise ConfigError(f"{name} is {shown(value)}; give {choices}")


def check_seconds(name: str, value: Any, expected: str) -> float:
    """``value`` as seconds from 0 on, cut to what a lock can wait, 292 years. Raises ConfigError
    with what was ``expected``.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value >= 0:  # NaN is neither
        raise ConfigError(f"{name} is {shown(value)}; give {expected}")
    return float(min(value, threading.TIMEOUT_MAX))


def check_backend(value: object) -> None:
    """``value`` names a backend, or is None: the one that runs. Raises ConfigError."""
    if value is not None and not (isinstance(value, str) and value in get_args(Backend)):
        raise ConfigError(
            f"backend is {shown(value)}; give 'hopper', 'portable', or None for hopper where it "
            "runs"
        )


def check_prefill(value: object) -> None:
    """``value`` says how prompts are scheduled, or is None: as the graphs allow. Raises
    ConfigError.
    """
    if value is not None and not (isinstance(value, str) and value in get_args(Prefill)):
        raise ConfigError(
            f"prefill is {shown(value)}; give 'mixed', 'separate', or None for mixed where mixed "
            "steps are captured"
        )


def check_kv_dtype(value: object) -> None:
    """``value`` says how keys and values are stored, or is None: in the model's dtype. Raises
    ConfigError.
    """
    if value is not None and not (isinstance(value, str) and value in get_args(KvDtype)):
        raise ConfigError(
            f"kv_dtype is {shown(value)}; give 'fp8', or None for the dtype of the model"
        )


def check_activations(value: object) -> None:
    """``value`` says what linears of many tokens read, or is None: numbers in the model's dtype.
    Raises ConfigError.
    """
    if value is not None and not (isinstance(value, str) and value in get_args(Activations)):
        raise ConfigError(
            f"activations is {shown(value)}; give 'fp8', or None for the dtype of the model"
        )


def check_callable(name: str, value: object, optional: bool = True) -> None:
    """Raises ConfigError unless ``value`` can be called, or may be None and is."""
    if not (callable(value) or (optional and value is None)):
        rest = ", or None" if optional else ""
        raise ConfigError(f"{name} is {shown(value)}; give a function{rest}")


def check_depth(value: object) -> int:
    """A number of steps in flight, 1 or 2. Raises ConfigError."""
    depth = as_index(value)
    if depth not in (1, 2):
        raise ConfigError(
            f"depth is {shown(value)}; give 1 (the blocking loop) or 2 (two steps in flight)"
        )
    return depth


class Capacity(NamedTuple):
    """How much a runtime holds."""

    max_rows: int
    max_len: int
    depth: int
    page_size: int
    max_stop_ids: int

    @property
    def pages_per_row(self) -> int:
        """Pages of a row that is full."""
        return -(-self.max_len // self.page_size)


def check_capacity(
    max_rows: object, max_len: object, depth: object, page_size: object | None, max_stop_ids: object
) -> Capacity:
    """A runtime's sizes as plain ints; ``page_size`` None is one page of ``max_len`` tokens.

    Raises:
        ConfigError: one of them is out of range.
    """
    steps, rows = check_depth(depth), check_count("max_rows", max_rows)
    tokens = check_count("max_len", max_len)
    page = tokens if page_size is None else check_count("page_size", page_size)
    return Capacity(rows, tokens, steps, page, check_count("max_stop_ids", max_stop_ids))


class Limits(NamedTuple):
    """What a pipeline can hold per row."""

    vocab_size: int
    max_len: int
    page_size: int
    pages_per_row: int
    max_stop_ids: int
    max_biases: int = 0
    penalties: bool = False
    prompt_logprobs: bool = False
    value_ids: int = 0


def check_ids(
    name: str,
    ids: Iterable[int],
    vocab_size: int,
    error: type[Exception] = RequestError,
    kind: str = "token id",
    whose: str = " of this model",
) -> tuple[int, ...]:
    """Token ids of a vocabulary, all at once: a prompt may have thousands, and others wait.

    `kind` and `whose` are how a message speaks of what is counted, where that is no token id.

    Raises:
        error: one of them is no id of the vocabulary; the message names the first.
    """
    entries = as_tuple(ids)
    if entries is None:
        raise error(f"{name} is {shown(ids)}; give a sequence of {kind}s")
    try:
        kinds = set(map(type, entries))
        checked = entries if kinds <= {int} else tuple(map(operator.index, entries))
        if bool in kinds:
            raise TypeError
    except TypeError:
        bad = next(entry for entry in entries if as_index(entry) is None)
        raise error(f"{name} holds {shown(bad)}, which is no {kind}; give integers") from None
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        outside = next(one for one in checked if not 0 <= one < vocab_size)
        raise error(f"{name} holds {shown(outside)}; {kind}s{whose} are 0 to {vocab_size - 1}")
    return checked


def check_context(prompt_tokens: int, max_new_tokens: int, max_len: int) -> None:
    """Raises RequestError unless a prompt and its answer fit a row, but for the answer's last
    token, which takes no place.
    """
    if prompt_tokens + max_new_tokens - 1 > max_len:
        raise RequestError(
            f"prompt of {prompt_tokens} tokens and max_new_tokens {max_new_tokens} exceed the "
            f"context of {max_len}; shorten one of them, or build the runtime with a larger max_len"
        )


def check_stop_ids(ids: tuple[int, ...], limits: Limits) -> None:
    """Raises RequestError where a row has no room for the ids."""
    if len(ids) > limits.max_stop_ids:
        raise RequestError(
            f"{len(ids)} stop token ids, the model's own included; a row has "
            f"{limits.max_stop_ids} at most (max_stop_ids)"
        )


def check_adjustment(biases: int, counts_tokens: bool, limits: Limits) -> None:
    """Raises RequestError where a row has no room for these logit biases, or none for the counts
    that penalties need.
    """
    if biases > limits.max_biases:
        raise RequestError(
            f"{biases} logit biases, those of bad_words included; a row has {limits.max_biases} at "
            "most (max_biases)"
        )
    if counts_tokens and not limits.penalties:
        raise RequestError(
            "repetition_penalty, presence_penalty and frequency_penalty need the runtime's "
            "penalty_vocab, all of the vocabulary, or the engine's penalties=True; leave them "
            "out, or make it so"
        )


def check_pages(pages: Iterable[int] | None, tokens: int, limits: Limits) -> tuple[int, ...] | None:
    """The pages of a row of ``tokens`` tokens: enough, different, from 0 on. None: the one page of
    the row's index.

    Raises:
        RequestError: they are missing, too few or too many, or one of them cannot be.
    """
    needed = -(-tokens // limits.page_size)
    if pages is None:
        if limits.pages_per_row > 1:
            raise RequestError(
                f"pages are missing: with page_size {limits.page_size} this request needs "
                f"{needed} pages"
            )
        return None
    held = _page_numbers(pages)
    if not needed <= len(held) <= limits.pages_per_row:
        raise RequestError(
            f"{len(held)} pages given; this request needs {needed}, and a row holds "
            f"{limits.pages_per_row} at most"
        )
    _check_different(held)
    return held


def check_more_pages(held: tuple[int, ...], more: Iterable[int], limits: Limits) -> tuple[int, ...]:
    """The pages of a row that holds ``held`` and gets ``more`` besides: all different.

    Raises:
        RequestError: they are too many, or one of them cannot be.
    """
    added = _page_numbers(more)
    pages = (*held, *added)
    if len(pages) > limits.pages_per_row:
        raise RequestError(
            f"{len(added)} pages given to a row of {len(held)}; it holds {limits.pages_per_row} at "
            "most"
        )
    _check_different(pages)
    return pages


def _page_numbers(pages: Iterable[int]) -> tuple[int, ...]:
    return check_ids("pages", pages, INT32_MAX + 1, kind="page number", whose="")


def _check_different(pages: tuple[int, ...]) -> None:
    if len(set(pages)) < len(pages):
        raise RequestError(f"pages {pages} names a page twice; each holds other tokens")
