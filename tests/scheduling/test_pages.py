"""PagePool: I9 (free + held = total) after every call, and no page with two owners."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.errors import ConfigError
from photon_ext.scheduling import PagePool

PAGES = 9


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a list of holds, each a list of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.holds: list[list[int]] = []

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        free = self.pool.free
        pages = self.pool.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert set(pages) <= set(range(PAGES))
        assert not set(pages) & {page for hold in self.holds for page in hold}
        self.holds.append(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @rule(page=st.integers(0, PAGES - 1))
    def double_free_is_refused(self, page: int) -> None:
        holders = sum(hold.count(page) for hold in self.holds)
        before = (self.pool.free, self.pool.held)
        with pytest.raises(ValueError, match=f"page {page} is released twice"):
            self.pool.release([page] * (holders + 1))
        assert (self.pool.free, self.pool.held) == before, "a refused call changes nothing"

    @invariant()
    def i9_pages_add_up(self) -> None:
        pool = self.pool
        assert pool.free + pool.held == pool.num_pages
        assert pool.held == sum(map(len, self.holds))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
