"""PagePool: I9 and I12 after every call: each page is free, held, or cached, and they add up."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.errors import ConfigError
from photon_ext.scheduling import PagePool

PAGES = 9


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a list of holds, each a list of pages, and the pages that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.pool.on_evict = self.evicted
        self.holds: list[list[int]] = []
        self.kept: set[int] = set()
        self.cached: list[int] = []  # the least recently released first

    def evicted(self, pages: list[int]) -> None:
        first, self.cached = self.cached[: len(pages)], self.cached[len(pages) :]
        assert pages == first, "the least recently released is evicted first"
        self.kept -= {*pages}

    @property
    def held(self) -> set[int]:
        return {page for hold in self.holds for page in hold}

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        free, evicted = self.pool.free, self.cached[: max(count - self.pool.free, 0)]
        held, available = self.held, self.pool.available
        pages = self.pool.allocate(count)
        if count > available:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert set(pages) <= set(range(PAGES))
        assert not set(pages) & {*held, *self.cached}
        assert set(evicted) == set(pages[free:]), "free ones first"
        self.holds.append(pages)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        there = sorted({*self.held, *self.cached})
        pages = data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
        self.pool.share(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.holds.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), kept=st.booleans())
    def keep(self, data: st.DataObject, kept: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.keep([page], kept)
        self.kept = self.kept | {page} if kept else self.kept - {page}

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(pages)
        self.cached += [p for p in reversed(pages) if p not in self.held and p in self.kept]

    @rule(page=st.integers(0, PAGES - 1))
    def double_free_is_refused(self, page: int) -> None:
        before = (self.pool.free, self.pool.held, self.pool.cached)
        with pytest.raises(ValueError, match=f"page {page} is released twice"):
            self.pool.release([page] * (1 + (page in self.held)))
        assert (self.pool.free, self.pool.held, self.pool.cached) == before, "nothing is changed"

    @invariant()
    def i9_and_i12_pages_add_up(self) -> None:
        pool = self.pool
        assert pool.free + pool.held + pool.cached == pool.num_pages
        assert pool.held == len(self.held)
        assert [page for page in range(PAGES) if pool.count_cached([page])] == sorted(self.cached)
        assert pool.available == pool.free + pool.cached


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("page", [3, -1])
def test_a_page_of_another_pool_is_refused(page: int) -> None:
    pool = PagePool(3)
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    with pytest.raises(ValueError, match=f"page {page} is not of this pool"):
        pool.release([page])


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.free == 1


@pytest.mark.parametrize("pages", [0, -1])
def test_an_empty_pool_is_refused(pages: int) -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(pages)
