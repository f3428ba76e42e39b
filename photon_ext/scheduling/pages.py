"""The pool of KV pages: which are free, which are held, and which are kept although nobody holds
them. It knows numbers, no memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from photon_ext.errors import ConfigError


class PagePool:
    """Pages 0 .. num_pages - 1; the engine thread owns them.

    Invariants I9 and I12, after every call: ``free + held + cached == num_pages``, and each page is
    one of: free; held, by as many rows as its count says; or cached, which nobody holds, and whose
    content is kept until its place is needed.

    Attributes:
        on_evict: called with the cached pages that are taken for something else.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self.on_evict: Callable[[list[int]], None] = lambda pages: None
        self._free = deque(range(num_pages))
        self._held: set[int] = set()
        self._other_holders = Counter[int]()  # of a page, besides the first; none: not in here
        self._kept: set[int] = set()  # held or cached pages that become cached, not free
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently released first

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that rows hold, each once."""
        return len(self._held)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and whose content is kept."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` could take now."""
        return len(self._free) + len(self._cached)

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of the pages are kept and held by nobody."""
        return sum(map(self._cached.__contains__, pages))

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, free ones first, then cached ones, the least recently used first;
        None, and takes none, where that many are not available.
        """
        if count < 0:
            raise ValueError(f"allocate: count is {count}; give a number >= 0")
        if count > self.available:
            return None
        take, evict = self._free.popleft, self._cached.popitem
        pages = [take() for _ in range(min(count, len(self._free)))]
        if evicted := [evict(last=False)[0] for _ in range(count - len(pages))]:
            self._kept.difference_update(evicted)
            self.on_evict(evicted)
            pages += evicted
        self._held.update(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more row holds these, which are held or cached."""
        pages, held = list(pages), self._held
        self._other_holders.update(filter(held.__contains__, pages))
        fresh = [page for page in pages if page not in held]
        for page in fresh:
            del self._cached[page]
        held.update(fresh)

    def keep(self, pages: Iterable[int], kept: bool = True) -> None:
        """Whether the content of these held pages is kept when nobody holds them any more."""
        (self._kept.update if kept else self._kept.difference_update)(pages)

    def release(self, pages: Iterable[int]) -> None:
        """One row less holds these. ValueError, and nothing is done, where one is not held or is
        named twice.

        Their order is that of positions; the last are the first to be evicted. So a kept page goes
        before the one that it continues, which every row that holds it holds, too.
        """
        pages = list(pages)
        if len(once := set(pages)) < len(pages) or not once <= self._held:
            raise ValueError(self._refusal(pages))
        if shared := once & self._other_holders.keys():
            self._share_less(shared)
            pages = [page for page in pages if page not in shared]
        self._held.difference_update(pages)
        kept, cached = self._kept, self._cached
        for page in reversed(pages):
            if page in kept:
                cached[page] = None
            else:
                self._free.append(page)

    def _share_less(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._other_holders[page] -= 1
            if not self._other_holders[page]:
                del self._other_holders[page]

    def _refusal(self, pages: list[int]) -> str:
        """Which of these cannot be released, and why."""
        bad = next(p for i, p in enumerate(pages) if p not in self._held or p in pages[:i])
        if 0 <= bad < self.num_pages:
            return f"release: page {bad} is released twice"
        last = self.num_pages - 1
        return f"release: page {bad} is not of this pool, whose pages are 0 to {last}"
