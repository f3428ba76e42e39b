"""One clock for two: where the profiler's clock stands against time.perf_counter_ns, found by
bracketing, with a bound of the error.

An anchor is an empty record_function range made between two readings of our clock. The profiler's
record of it lies between the readings, which bounds the offset of its clock from both sides.
Several anchors narrow the interval; anchors at the begin and at the end of the window show how far
the clocks drift apart, and times in between are corrected linearly.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch._C._profiler import _RecordFunctionFast

ANCHOR = "photon_ext::anchor"
REPEATS = 16  # per end; the first ones warm up


class Bracket(NamedTuple):
    """Two readings of our clock around an anchor, nanoseconds."""

    before: int
    after: int


class Offset(NamedTuple):
    """The profiler's clock minus ours lies within `error` of `value`; seen at `time` of our clock.

    Nanoseconds.
    """

    value: int
    error: int
    time: int


def drop_anchors() -> list[Bracket]:
    """Makes REPEATS anchors while a profiler runs."""
    brackets = []
    for _ in range(REPEATS):
        anchor = _RecordFunctionFast(ANCHOR)
        before = time.perf_counter_ns()
        with anchor:
            pass
        brackets.append(Bracket(before, time.perf_counter_ns()))
    return brackets


def find_offset(brackets: Sequence[Bracket], ranges: Iterable[tuple[int, int]]) -> Offset | None:
    """The offset from anchors and their (start, end) in the profiler's records, in the same
    order; None if they do not match.
    """
    found = list(ranges)
    if not brackets or len(found) != len(brackets):
        return None
    low = max(end - bracket.after for bracket, (_, end) in zip(brackets, found, strict=True))
    high = min(start - bracket.before for bracket, (start, _) in zip(brackets, found, strict=True))
    # clocks that were stepped in between: the interval is what they disagree by
    low, high = min(low, high), max(low, high)
    return Offset((low + high) // 2, (high - low + 1) // 2, brackets[len(brackets) // 2].before)


class Converter:
    """From the profiler's nanoseconds to ours."""

    def __init__(self, first: Offset, last: Offset) -> None:
        self.error = max(first.error, last.error)
        self.drift = last.value - first.value
        self._first = first
        self._span = last.time - first.time

    def __call__(self, profiler_ns: int) -> int:
        ours = profiler_ns - self._first.value
        return (
            ours - round(self.drift * (ours - self._first.time) / self._span)
            if self._span > 0 and self.drift
            else ours
        )
