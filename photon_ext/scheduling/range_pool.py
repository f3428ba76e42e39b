"""Ranges of a memory on the device: places of embeddings, words of automata. It knows numbers, no
memory.
"""

from __future__ import annotations


class RangePool:
    """Places 0 .. size - 1, given in ranges: the first gap that is long enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # where ranges begin and end, in order

    @property
    def free(self) -> int:
        """Places that nobody has, in one range or in several."""
        return self.size - sum(end - begin for begin, end in self._taken.items())

    def allocate(self, count: int) -> int | None:
        """The first of ``count`` places in a row; None, and takes none, where no gap is as long."""
        begin = 0
        for taken, end in self._taken.items():
            if taken - begin >= count:
                break
            begin = end
        if begin + count > self.size:
            return None
        self._taken = dict(sorted({**self._taken, begin: begin + count}.items()))
        return begin

    def release(self, begin: int) -> None:
        """The range that begins there is free again. KeyError: none does."""
        del self._taken[begin]
