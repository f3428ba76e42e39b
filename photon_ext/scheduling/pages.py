"""The pool of KV pages: which are free, held or cached. It knows page numbers only, not the memory behind them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from photon_ext.errors import ConfigError


class PagePool:
    """Pages 1 .. num_pages; page 0 is nobody's (padding rows and unused table entries point at it).

    Invariant I9, after every call: `free + held + cached == num_pages`.

    - A held page has one reference per holder (a lease, or several that share a prefix).
    - A page whose last reference goes becomes free, or cached when the release says that its contents are worth keeping.
    - A cached page is taken again by `retain` (its contents are as they were) or, oldest first, by `allocate` (they are lost).

    Not thread-safe: the engine thread owns it.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        """`on_evict(page)` is called when allocate takes a cached page, so that whoever indexes its contents forgets it."""
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._refs = [0] * (num_pages + 1)
        self._free = deque(range(1, num_pages + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.num_pages - self.free - self.cached

    @property
    def available(self) -> int:
        """How many pages allocate can give now: the free ones, then the cached ones."""
        return self.free + self.cached

    def refs(self, page: int) -> int:
        """How many holders a page has; 0: free or cached."""
        self._check(page)
        return self._refs[page]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages with one reference each, or none at all (None) when that many are not to be had."""
        if count < 0:
            raise ValueError(f"allocate: count is {count}; give a number >= 0")
        if count > self.available:
            return None
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held or cached.

        Raises:
            ValueError: a page is free (its contents belong to nobody) or out of range; nothing has changed then.
        """
        pages = list(pages)
        for page in pages:
            self._check(page)
            if self._refs[page] == 0 and page not in self._cached:
                raise ValueError(f"retain: page {page} is free; only held and cached pages have contents to share")
        for page in pages:
            self._cached.pop(page, None)
            self._refs[page] += 1

    def release(self, pages: Iterable[int], keep: bool = False) -> None:
        """Gives references back; a page without any left becomes cached if `keep`, else free.

        Raises:
            ValueError: a page is released more often than it is held (a double free) or is out of range; nothing has changed then.
        """
        pages = list(pages)
        dropped: dict[int, int] = {}
        for page in pages:
            self._check(page)
            dropped[page] = dropped.get(page, 0) + 1
            if dropped[page] > self._refs[page]:
                raise ValueError(f"release: page {page} has {self._refs[page]} holders; it is released twice")
        for page in pages:
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if keep:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        page, _ = self._cached.popitem(last=False)
        if self._on_evict is not None:
            self._on_evict(page)
        return page

    def _check(self, page: int) -> None:
        if not 1 <= page <= self.num_pages:
            raise ValueError(f"page {page} is not of this pool, whose pages are 1 to {self.num_pages}")
