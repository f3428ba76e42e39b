"""Full KV pages by what they hold, so that a prompt that begins as another one finds its keys and
values there.

A page's key is the page that it continues and its own tokens: a chain from the first page on, whose
tokens are compared, not only their hash; an image's are numbers of 63 bits that its content hashes
to. What differs in anything else (adapter, tenant) has another root. Tokens are bytes here
(`token_bytes`): they are cut, hashed and compared in half the time that tuples take, and a prompt's
are made on its caller's thread.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from photon_ext.scheduling.pages import PagePool

Key = tuple[Hashable, bytes]  # the page before it, or the root of the chain; its tokens
TOKEN_BYTES = 8  # room for what says an embedding's content, too


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids, and numbers of 64 bits for embeddings, as the cache takes them."""
    return struct.pack(f"{len(ids)}q", *ids)


class Match(NamedTuple):
    """What is there of a prompt.

    Attributes:
        pages: leading pages, in order.
        awaited: the last of the pages that come next and that a row is writing; None: there are
            none.
    """

    pages: list[int]
    awaited: int | None


class PrefixCache:
    """Pages of a pool, by content. A page is entered when a row begins to write it (``enter``), may
    be read once it is written (``written``), and leaves when the pool needs its place.

    Invariant I13: what `match` gives was written by steps that are committed, and is not written
    again.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_bytes = TOKEN_BYTES * page_size
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._unwritten: set[int] = set()
        # who waits for pages is asked for each turn; until a page comes or leaves, the same holds
        self._latest: tuple[bytes, Hashable, Match] | None = None
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """Pages that may be read."""
        return len(self._keys) - len(self._unwritten)

    def match(self, tokens: bytes, root: Hashable) -> Match:
        """The longest chain of pages that hold the beginning of ``tokens``, without the last token,
        which has to be fed.
        """
        if (latest := self._latest) is not None and latest[0] is tokens and latest[1] == root:
            return latest[2]
        match, before, size = Match([], None), root, self._page_bytes
        for begin in range(0, len(tokens) - TOKEN_BYTES - size + 1, size):
            page = self._pages.get((before, tokens[begin : begin + size]))
            if page is None:
                break
            if page in self._unwritten:
                match = Match(match.pages, page)
            else:
                match.pages.append(page)
            before = page
        self._latest = (tokens, root, match) if match.awaited is None else None
        return match

    def is_written(self, page: int) -> bool:
        """False while a row is at it; True once it may be read, or nobody writes it any more."""
        return page not in self._unwritten

    def enter(self, tokens: bytes, pages: Sequence[int], root: Hashable, begin: int = 0) -> int:
        """A row will write the full pages of ``tokens`` into its ``pages``, those before number
        ``begin`` being entered already. Returns how many of its leading pages are entered now: up
        to the first whose content another page has.
        """
        before, end, size = pages[begin - 1] if begin else root, begin, self._page_bytes
        known, keys = self._pages, self._keys
        for at in range(begin * size, len(tokens) - size + 1, size):
            page, key = pages[end], (before, tokens[at : at + size])
            if known.setdefault(key, page) != page:
                break
            keys[page] = key
            before, end = page, end + 1
        if end > begin:
            self._unwritten.update(pages[begin:end])
            self._pool.keep(pages[begin:end])
            self._latest = None
        return end

    def written(self, pages: Sequence[int]) -> None:
        """These are written, by steps that are committed."""
        self._unwritten.difference_update(pages)

    def abandon(self, pages: Sequence[int]) -> None:
        """Their row has left: those that it has not written hold nothing."""
        lost = [page for page in pages if page in self._unwritten]
        self._pool.keep(lost, False)
        self._forget(lost)

    def _forget(self, pages: Sequence[int]) -> None:
        known, take_key = self._pages, self._keys.pop
        for page in pages:
            del known[take_key(page)]
        if pages:
            self._unwritten.difference_update(pages)
            self._latest = None
