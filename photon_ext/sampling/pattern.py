"""Regular languages of text, as trees: what regular expressions, choices and schemas become before
an automaton is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]
"""Code points, as inclusive ranges."""


class NotRegular(Exception):
    """A form has no automaton here; the text says why, for users: the host keeps such forms."""


class TooSlow(NotRegular):
    """The automaton was not made in time, for its size or the machine's load."""


class Characters(NamedTuple):
    """One character of these ranges."""

    ranges: Ranges


class Joined(NamedTuple):
    """One after the other; of no parts, the empty text."""

    parts: tuple[Pattern, ...]


class Either(NamedTuple):
    """One of them; of no parts, no text at all."""

    parts: tuple[Pattern, ...]


class Repeated(NamedTuple):
    """`least` times to `most` times; None: any number."""

    part: Pattern
    least: int
    most: int | None


Pattern = Characters | Joined | Either | Repeated

NOTHING = Joined(())


def literal(text: str) -> Pattern:
    """This text alone."""
    return Joined(tuple(Characters(((ord(c), ord(c)),)) for c in text))


def joined(*parts: Pattern | str) -> Pattern:
    """One after the other; texts stand for themselves."""
    return Joined(tuple(literal(part) if isinstance(part, str) else part for part in parts))


def optional(part: Pattern) -> Pattern:
    """It, or nothing."""
    return Either((part, NOTHING))


def without(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters but these."""
    found, begin = [], 0
    for first, last in sorted([*ranges, _SURROGATES]):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= MAX_CHARACTER:
        found.append((begin, MAX_CHARACTER))
    return tuple(found)


def byte_sequences(first: int, last: int) -> Iterable[Sequence[tuple[int, int]]]:
    """The UTF-8 of the characters first .. last: sequences of ranges of bytes."""
    for low, high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF)):
        yield from _of_one_length(max(first, low), min(last, high))
    yield from _of_one_length(max(first, 0x10000), min(last, MAX_CHARACTER))


def _of_one_length(first: int, last: int) -> Iterable[Sequence[tuple[int, int]]]:
    """The same for characters whose bytes are equally many."""
    if first > last:
        return
    low, high = chr(first).encode(), chr(last).encode()
    for tail in range(1, len(low)):
        size = 1 << 6 * tail
        if first // size == last // size:
            continue
        if first % size:
            middle = first // size * size + size
            yield from _of_one_length(first, middle - 1)
            yield from _of_one_length(middle, last)
            return
        if last % size != size - 1:
            middle = last // size * size
            yield from _of_one_length(first, middle - 1)
            yield from _of_one_length(middle, last)
            return
    yield tuple(zip(low, high, strict=True))
