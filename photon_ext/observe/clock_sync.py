"""One clock for two: where the profiler's clock stands against time.perf_counter_ns.

A sync mark is an empty record_function range made between two readings of our clock. The profiler's
record of it lies between the readings, which bounds the offset of its clock from both sides. Marks
at the begin and at the end of a recording show how far the clocks drift apart; times in between are
corrected linearly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch._C._profiler import _RecordFunctionFast

MARK = "photon_ext::clock_sync"
REPEATS = 16  # per end; the first ones warm up


class Bracket(NamedTuple):
    """Two readings of our clock around a sync mark, nanoseconds."""

    before: int
    after: int


class Offset(NamedTuple):
    """The profiler's clock minus ours is `value` ± `error`, at `time` of our clock. Nanoseconds."""

    value: int
    error: int
    time: int


def make_marks() -> list[Bracket]:
    """Makes REPEATS sync marks while a profiler runs."""
    brackets = []
    for _ in range(REPEATS):
        mark = _RecordFunctionFast(MARK)
        before = time.perf_counter_ns()
        with mark:
            pass
        brackets.append(Bracket(before, time.perf_counter_ns()))
    return brackets


def find_offset(brackets: Sequence[Bracket], ranges: Sequence[tuple[int, int]]) -> Offset | None:
    """The offset from marks and their (start, end) in the profiler's records, in the same order.

    None if they do not match.
    """
    if not brackets or len(ranges) != len(brackets):
        return None
    pairs = list(zip(brackets, ranges, strict=True))
    low = max(end - bracket.after for bracket, (_, end) in pairs)
    high = min(start - bracket.before for bracket, (start, _) in pairs)
    low, high = min(low, high), max(low, high)  # the clocks may have been set in between
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
        if self._span <= 0:
            return ours
        return ours - round(self.drift * (ours - self._first.time) / self._span)
