"""What a runtime and a pipeline are made with, checked before anything is taken: the message
names the argument and what to give.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from photon_ext.errors import ConfigError

INT32_MAX = 2**31 - 1  # the device counts rows, positions and tokens in int32


def checked_count(name: str, value: object, most: int = INT32_MAX) -> int:
    """``value`` as an int from 1 to ``most``; anything that is an index will do, but a bool.

    Raises ConfigError.
    """
    number = as_index(value)
    if number is None or isinstance(value, bool) or not 1 <= number <= most:
        raise ConfigError(f"{name} is {value!r}; give an integer from 1 to {most}")
    return number


def checked_counts(name: str, values: object, most: int = INT32_MAX) -> tuple[int, ...]:
    """All of ``values`` as ints from 1 to ``most``. Raises ConfigError."""
    entries = as_tuple(values)
    if entries is None:
        raise ConfigError(f"{name} is {values!r}; give a tuple of integers from 1 on")
    return tuple(checked_count(f"an entry of {name}", entry, most) for entry in entries)


def check_callable(name: str, value: object, optional: bool = True) -> None:
    """Raises ConfigError unless ``value`` can be called, or may be None and is."""
    if not (callable(value) or (optional and value is None)):
        raise ConfigError(f"{name} is {value!r}; give a function{', or None' if optional else ''}")


def as_index(value: Any) -> int | None:
    """``value`` as an int; None where it is not one."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_tuple(values: Any) -> tuple[Any, ...] | None:
    """All of ``values``; None where it cannot be iterated over.

    What it raises on the way passes through.
    """
    try:
        iterator = iter(values)
    except TypeError:
        return None
    return tuple(iterator)


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


def checked_capacity(
    max_rows: object, max_len: object, depth: object, page_size: object | None, max_stop_ids: object
) -> Capacity:
    """A runtime's sizes as plain ints; ``page_size`` None is one page of ``max_len`` tokens.

    Raises ConfigError.
    """
    steps = as_index(depth)
    if steps not in (1, 2) or isinstance(depth, bool):
        raise ConfigError(f"depth is {depth!r}; use 1 (blocking loop) or 2 (ping-pong)")
    rows, tokens = checked_count("max_rows", max_rows), checked_count("max_len", max_len)
    page = tokens if page_size is None else checked_count("page_size", page_size)
    return Capacity(rows, tokens, steps, page, checked_count("max_stop_ids", max_stop_ids))
