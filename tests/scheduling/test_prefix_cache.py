"""The prefix cache: what it finds, whose pages it waits for, and what leaves it first."""

from __future__ import annotations

import pytest

from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.prefix_cache import TOKEN_BYTES, Match, PrefixCache, token_bytes

SIZE, PAGES = 2, 6
PROMPT = token_bytes((1, 2, 3, 4, 5, 6, 7))


@pytest.fixture
def pool() -> PagePool:
    return PagePool(PAGES)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool, SIZE)


def of(*ids: int) -> bytes:
    return token_bytes(ids)


def write(pool: PagePool, cache: PrefixCache, tokens: bytes, root: object = None) -> list[int]:
    """A row comes, writes these tokens, and goes; its pages."""
    found = cache.match(tokens + of(0), root)
    pool.share(found.pages)
    needed = -(-len(tokens) // (SIZE * TOKEN_BYTES)) - len(found.pages)
    pages = [*found.pages, *(pool.allocate(needed) or [])]
    entered = cache.enter(tokens, pages, root, len(found.pages))
    cache.written(pages[:entered])
    pool.release(pages)
    return pages


def test_full_pages_of_the_same_beginning_are_found(pool: PagePool, cache: PrefixCache) -> None:
    pages = write(pool, cache, PROMPT)
    assert (len(cache), pool.cached, pool.free) == (3, 3, 3)
    assert cache.match(PROMPT, None) == Match(pages[:3], None)
    assert cache.match(of(1, 2, 3, 9, 5, 6, 7), None).pages == pages[:1]
    assert cache.match(of(3, 4, 5, 6), None).pages == [], "the same tokens in another place"


def test_the_last_token_is_always_left_to_be_fed(pool: PagePool, cache: PrefixCache) -> None:
    pages = write(pool, cache, of(1, 2, 3, 4))
    assert cache.match(of(1, 2, 3, 4), None).pages == pages[:1]
    assert cache.match(of(1, 2, 3, 4, 5), None).pages == pages
    assert cache.match(of(1), None).pages == []


def test_another_root_shares_nothing(pool: PagePool, cache: PrefixCache) -> None:
    mine = write(pool, cache, PROMPT, root="a tenant")
    assert cache.match(PROMPT, None).pages == []
    assert cache.match(PROMPT, "another").pages == []
    assert cache.match(PROMPT, "a tenant").pages == mine[:3]


def test_hazard_29_a_page_is_found_only_once_it_is_written(
    pool: PagePool, cache: PrefixCache
) -> None:
    pages = pool.allocate(4) or []
    assert cache.enter(PROMPT, pages, None) == 3
    assert cache.match(PROMPT, None) == Match([], pages[2])
    cache.written(pages[:2])
    assert cache.match(PROMPT, None) == Match(pages[:2], pages[2])
    assert cache.match(of(1, 2, 3, 4, 9, 9, 9), None) == Match(pages[:2], None)
    assert not cache.is_written(pages[2])


def test_what_a_row_did_not_come_to_write_is_forgotten(pool: PagePool, cache: PrefixCache) -> None:
    pages = pool.allocate(4) or []
    cache.enter(PROMPT, pages, None)
    cache.written(pages[:1])
    cache.abandon(pages[1:3])
    pool.release(pages)
    assert cache.is_written(pages[1])
    assert cache.match(PROMPT, None) == Match(pages[:1], None)
    assert (pool.cached, pool.free) == (1, 5)


def test_a_row_that_writes_what_another_wrote_is_not_followed(
    pool: PagePool, cache: PrefixCache
) -> None:
    """Its later pages would continue a page that it does not hold."""
    first = pool.allocate(2) or []
    second = pool.allocate(3) or []
    cache.enter(PROMPT[: 4 * TOKEN_BYTES], first, None)
    assert cache.enter(PROMPT, second, None) == 0
    assert cache.match(PROMPT, None) == Match([], first[1])


def test_generated_tokens_continue_the_chain(pool: PagePool, cache: PrefixCache) -> None:
    pages = pool.allocate(4) or []
    entered = cache.enter(PROMPT[: 3 * TOKEN_BYTES], pages, None)
    cache.written(pages[:entered])
    assert cache.enter(PROMPT, pages, None, entered) == 3
    cache.written(pages[entered:3])
    assert cache.match(PROMPT, None).pages == pages[:3]


def test_leaves_are_evicted_first_the_least_recently_used_ones_before(
    pool: PagePool, cache: PrefixCache
) -> None:
    old = write(pool, cache, of(1, 2, 3, 4))
    new = write(pool, cache, of(1, 2, 7, 8, 9, 9))
    assert new[0] == old[0]
    evicted: list[int] = []
    forget = pool.on_evict

    def note(pages: list[int]) -> None:
        evicted.extend(pages)
        forget(pages)

    pool.on_evict = note
    for _ in range(4 + pool.free):
        pool.allocate(1)
    assert evicted == [old[1], new[2], new[1], new[0]]
    assert len(cache) == 0


def test_what_is_evicted_is_found_no_more(pool: PagePool, cache: PrefixCache) -> None:
    pages = write(pool, cache, PROMPT)
    pool.allocate(4)
    assert cache.match(PROMPT, None).pages == pages[:2]
    pool.allocate(2)
    assert cache.match(PROMPT, None).pages == []


def test_pages_that_a_row_holds_are_not_evicted(pool: PagePool, cache: PrefixCache) -> None:
    pages = write(pool, cache, PROMPT)
    pool.share(found := cache.match(PROMPT, None).pages)
    assert pool.allocate(4) is None
    assert pool.allocate(3) is not None
    assert cache.match(PROMPT, None).pages == found == pages[:3]


def test_who_waits_is_compared_again_only_where_pages_have_changed(
    pool: PagePool, cache: PrefixCache
) -> None:
    """It asks at each turn, and a long prompt has thousands of pages."""
    looks = []

    class Watched(bytes):
        __slots__ = ()

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            looks.append(key)
            return super().__getitem__(key)  # type: ignore[index]

    prompt = Watched(PROMPT)
    pages = pool.allocate(3) or []
    assert cache.match(prompt, None) == cache.match(prompt, None) == Match([], None)
    assert len(looks) == 1
    cache.enter(PROMPT, pages, None)
    looks.clear()
    cache.written(pages)
    assert cache.match(prompt, None) == cache.match(prompt, None) == Match(pages, None)
    assert len(looks) == len(pages)
    assert cache.match(prompt, "another") == Match([], None)
    pool.release(pages)
    pool.allocate(PAGES)
    assert cache.match(prompt, None) == Match([], None)
