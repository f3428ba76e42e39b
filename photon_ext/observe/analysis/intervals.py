"""Who is innermost when: nested spans of one thread, flattened, and looked up by time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A stretch of time with one innermost span; `path` is outermost first."""

    start: int
    end: int
    path: tuple[Any, ...]


class Cover:
    """The innermost spans of one thread, by time; a span is what has a `start` and an `end`."""

    def __init__(self, spans: Iterable[Any] = ()) -> None:
        self.pieces = flatten(spans)
        self._ends = [piece.end for piece in self.pieces]

    def at(self, time: int) -> tuple[Any, ...]:
        """The spans around `time`, outermost first."""
        place = bisect_right(self._ends, time)
        inside = place < len(self.pieces) and self.pieces[place].start <= time
        return self.pieces[place].path if inside else ()

    def within(self, start: int, end: int) -> Iterator[Piece]:
        """All of [start, end], in order, cut where the innermost span changes; with an empty path
        where there is none."""
        reached = start
        place = bisect_right(self._ends, start)
        while place < len(self.pieces) and self.pieces[place].start < end:
            piece = self.pieces[place]
            if piece.start > reached:
                yield Piece(reached, piece.start, ())
            reached = min(piece.end, end)
            yield Piece(max(piece.start, start), reached, piece.path)
            place += 1
        if reached < end:
            yield Piece(reached, end, ())


def flatten(spans: Iterable[Any]) -> list[Piece]:
    """Stretches that do not overlap, by time, of spans that nest.

    Of a span that outlives the one around it, both stay open.
    """
    pieces: list[Piece] = []
    stack: list[Any] = []
    reached = 0

    def advance(time: int) -> None:
        nonlocal reached
        if stack and time > reached:
            pieces.append(Piece(reached, time, tuple(stack)))
        reached = max(reached, time)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1].end <= span.start:
            advance(stack[-1].end)
            stack.pop()
        advance(span.start)
        stack.append(span)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return pieces


def by_thread(items: Iterable[Any]) -> dict[int, list[Any]]:
    """Items by their `thread`, in order."""
    found: dict[int, list[Any]] = {}
    for item in items:
        found.setdefault(item.thread, []).append(item)
    return found
