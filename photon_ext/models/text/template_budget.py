"""Budget.

What a render of a template may write, and how long it may take, in units that are spent before the
work is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from string import Formatter
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

_LEAST_UNITS = 2**22  # about a second of a hostile template
_UNITS_PER_INPUT = 64  # how often a template may write its messages, or look through them
_MOST_INPUT = 2**25  # characters and elements of the messages
MOST_BITS = 4096  # of an integer
MOST_WIDTH = 1000  # of a field, an indentation, ...
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class TemplateLimit(TemplateRuntimeError):
    """The template asked for more than a render may take."""


class Budget:
    """The units that one render has left."""

    def __init__(self, variables: Mapping[str, Any], rounds: int) -> None:
        """`variables`: what the template is given; `rounds`.

        Units for its loop over the messages.
        """
        self.limit = self._left = _MOST_INPUT
        given = self.weigh(variables)
        self.limit = self._left = _LEAST_UNITS + _UNITS_PER_INPUT * given + rounds

    def spend(self, units: int) -> None:
        """Raises TemplateLimit where less is left."""
        if units > self._left:
            raise TemplateLimit(f"more than {self.limit} characters and rounds of loops")
        self._left -= units

    def joined(self, pieces: Iterable[str]) -> str:
        """The text of the pieces, each spent as it comes."""
        taken = []
        for piece in pieces:
            self.spend(len(piece))
            taken.append(piece)
        return "".join(taken)

    def made(self, value: Any) -> Any:
        """Spends the size of a new value, its elements not looked into, and returns it."""
        if isinstance(value, (str, bytes, list, tuple, dict, set)):
            self.spend(1 + len(value))
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise TemplateLimit(
                f"an integer of {value.bit_length()} bits, expected up to {MOST_BITS}"
            )
        return value

    def weigh(self, value: Any) -> int:
        """Spends all that stands in a value, once for each place where it does.

        Returns how much that is.
        """
        before, pending = self._left, [value]
        while pending:
            item = pending.pop()
            if isinstance(item, (str, bytes, range)):
                self.spend(1 + len(item))
            elif isinstance(item, (list, tuple, AbstractSet, ValuesView)):
                self.spend(1 + len(item))
                pending.extend(item)
            elif isinstance(item, Mapping):
                self.spend(1 + 2 * len(item))
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, Namespace):
                raise TemplateLimit("a namespace stands where a text or a number should")
            else:
                self.spend(1)
        return before - self._left

    def rounds(self, values: Iterable[Any], size: int) -> Iterator[Any]:
        """The values; each spends `size` when it comes."""
        for value in values:
            self.spend(size)
            yield value

    def listed(self, value: Any) -> Any:
        """What an iterator yields as a list, since it can be weighed only so.

        Any other value as it is.
        """
        return list(self.rounds(value, 1)) if isinstance(value, Iterator) else value


_current: ContextVar[Budget] = ContextVar("budget")


def current() -> Budget:
    """The budget of the render that calls."""
    return _current.get()


@contextmanager
def budgeted(budget: Budget) -> Iterator[None]:
    """What is compiled or rendered inside spends from `budget`."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def format_size(form: str, given: int) -> int:
    """Characters that str.format makes of `form` and arguments of `given` units, at the most."""
    size = len(form)
    for _, field, spec, _ in Formatter().parse(form):
        if field is None:
            continue
        if "{" in (spec or ""):
            raise TemplateLimit("a width that str.format takes from an argument")
        size += given + sum(map(_width, re.findall(r"\d+", spec or "")))
    return size


def percent_size(form: str | bytes, given: int) -> int:
    """The same for the operator %."""
    if isinstance(form, bytes) or re.search(r"%\([^)]*\(", form):
        raise TemplateLimit("a format of bytes, or with nested parentheses")
    size = len(form)
    for conversion in _CONVERSION.finditer(form):
        if "*" in conversion.groups():
            raise TemplateLimit("a width that % takes from an argument")
        size += given + sum(_width(digits) for digits in conversion.groups() if digits)
    return size


def _width(digits: str) -> int:
    if len(digits) > 4 or int(digits) > MOST_WIDTH:
        raise TemplateLimit(f"a width of {digits[:20]}, expected up to {MOST_WIDTH}")
    return int(digits)
