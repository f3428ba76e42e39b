"""Who is innermost when: nested spans of one thread, flattened, and looked up by time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class HasSpan(Protocol):
    """Anything from `start` to `end`."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


T = TypeVar("T", bound=HasSpan)


class Piece(NamedTuple):
    """A stretch of time with one innermost span; `path` is outermost first."""

    start: int
    end: int
    path: tuple[Any, ...]


class Cover(Generic[T]):
    """The innermost spans of one thread, by time."""

    def __init__(self, spans: Iterable[T]) -> None:
        self.pieces = flatten(spans)
        self._ends = [piece.end for piece in self.pieces]

    def at(self, time: int) -> tuple[T, ...]:
        """The spans around `time`, outermost first."""
        place = bisect_right(self._ends, time)
        return (
            self.pieces[place].path
            if place < len(self.pieces) and self.pieces[place].start <= time
            else ()
        )

    def within(self, start: int, end: int) -> Iterator[Piece]:
        """All of [start, end], in order, cut where the innermost span changes; with an empty
        path where there is none.
        """
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


def flatten(spans: Iterable[T]) -> list[Piece]:
    """Stretches that do not overlap, by time, of spans that nest.

    Of a span that outlives the one around it, both stay open.
    """
    pieces: list[Piece] = []
    stack: list[T] = []
    reached = 0

    def advance(time: int) -> None:
        nonlocal reached
        if stack and time > reached:
            pieces.append(Piece(reached, time, tuple(stack)))
        reached = max(reached, time)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        _leave(stack, span.start, advance)
        advance(span.start)
        stack.append(span)
    _leave(stack, None, advance)
    return pieces


def _leave(stack: list[T], time: int | None, advance: Any) -> None:
    """Ends all spans that are over at `time` (None: all)."""
    while stack and (time is None or stack[-1].end <= time):
        advance(stack[-1].end)
        stack.pop()


def by_thread(items: Sequence[Any]) -> dict[int, list[Any]]:
    """Items by their `thread`, in order."""
    found: dict[int, list[Any]] = {}
    for item in items:
        found.setdefault(item.thread, []).append(item)
    return found
