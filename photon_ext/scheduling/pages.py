"""The pool of KV pages: which are free and which are held. It knows numbers, no memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from photon_ext.errors import ConfigError


class PagePool:
    """Pages 0 .. num_pages - 1; the engine thread owns them.

    Invariant I9, after every call: `free + held == num_pages`.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._held)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages; None, and takes none, where that many are not free."""
        if count < 0:
            raise ValueError(f"allocate: count is {count}; give a number >= 0")
        if count > self.free:
            return None
        pages = [self._free.popleft() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back. ValueError, and none is, where one is not held or is named twice."""
        pages = list(pages)
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(
                    f"release: page {page} is not of this pool, whose pages are 0 to "
                    f"{self.num_pages - 1}"
                )
            if page in seen or page not in self._held:
                raise ValueError(f"release: page {page} is released twice")
            seen.add(page)
        self._held -= seen
        self._free.extend(pages)
