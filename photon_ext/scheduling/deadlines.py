"""Which requests have a deadline, and whose has passed."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple

from photon_ext.scheduling.sequence import Sequence, Sink

FEW = 64


class _Entry(NamedTuple, Generic[Sink]):
    deadline: float
    id: int  # differs, so that no two sequences are compared
    sequence: Sequence[Sink]


class Deadlines(Generic[Sink]):
    """Sequences with a deadline, the next one first: a turn looks at that one alone.

    A sequence that ends otherwise stays until it is the next, but at most as many as are live, or a
    few.

    Attributes:
        clock: seconds, as those of the deadlines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._entries: list[_Entry[Sink]] = []  # a heap
        self._most = FEW

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence[Sink]) -> None:
        """Remembers its deadline, if it has one."""
        if sequence.deadline == math.inf:
            return
        if len(self._entries) >= self._most:
            self._entries = [entry for entry in self._entries if not entry.sequence.ended]
            heapq.heapify(self._entries)
            self._most = max(FEW, 2 * len(self._entries))
        heapq.heappush(self._entries, _Entry(sequence.deadline, sequence.id, sequence))

    def passed(self) -> Iterator[Sequence[Sink]]:
        """Those that have not ended though their deadline has passed; each once."""
        entries, now = self._entries, self.clock() if self._entries else 0.0
        while entries and (entries[0].sequence.ended or entries[0].deadline <= now):
            sequence = heapq.heappop(entries).sequence
            if not sequence.ended:
                yield sequence
