"""PagePool: I9 (free + held + cached = total) after every call, and no page with two owners that do not know of each other."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.errors import ConfigError
from photon_ext.scheduling import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a list of holds (each a list of pages), and what is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = PagePool(9, on_evict=self.evicted.append)
        self.holds: list[list[int]] = []
        self.cached: list[int] = []

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        free, cached = self.pool.free, list(self.cached)
        pages = self.pool.allocate(count)
        if count > free + len(cached):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & {page for hold in self.holds for page in hold}
        taken = max(0, count - free)
        assert self.evicted == cached[:taken], "cached pages go oldest first, and only when none is free"
        self.evicted.clear()
        del self.cached[:taken]
        self.holds.append(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(hold, keep=keep)
        if keep:
            left = {page for other in self.holds for page in other}
            self.cached += [page for page in hold if page not in left]

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.pool.retain(hold)
        self.holds.append(list(hold))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def take_back_from_cache(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.cached))
        self.pool.retain([page])
        self.cached.remove(page)
        self.holds.append([page])

    @rule(page=st.integers(1, 9))
    def double_free_is_refused(self, page: int) -> None:
        holders = sum(hold.count(page) for hold in self.holds)
        before = (self.pool.free, self.pool.held, self.pool.cached)
        with pytest.raises(ValueError, match="released twice"):
            self.pool.release([page] * (holders + 1))
        assert (self.pool.free, self.pool.held, self.pool.cached) == before, "a refused call changes nothing"

    @invariant()
    def i9_pages_add_up(self) -> None:
        pool = self.pool
        assert pool.free + pool.held + pool.cached == pool.num_pages
        assert pool.held == len({page for hold in self.holds for page in hold})
        assert pool.cached == len(self.cached)
        for page in range(1, 10):
            assert pool.refs(page) == sum(hold.count(page) for hold in self.holds)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_page_zero_is_nobodys() -> None:
    pool = PagePool(3)
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    with pytest.raises(ValueError, match="page 0 is not of this pool"):
        pool.release([0])


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.free == 1


def test_a_free_page_has_nothing_to_share() -> None:
    with pytest.raises(ValueError, match="page 2 is free"):
        PagePool(3).retain([2])


@pytest.mark.parametrize("pages", [0, -1])
def test_an_empty_pool_is_refused(pages: int) -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(pages)
