"""AdapterSlots: who is in a slot, who leaves it, and who waits."""

from __future__ import annotations

import pytest

from photon_ext.scheduling.adapters import Adapter, AdapterSlots


class Arrival:
    """A copy that is done when it is told so, or waited for."""

    def __init__(self) -> None:
        self.come = False

    def done(self) -> bool:
        return self.come

    def wait(self) -> None:
        self.come = True


class Store:
    """Slots that remember what was loaded."""

    def __init__(self, count: int, arrives: bool = True) -> None:
        self.count = count
        self.loads: list[tuple[int, str]] = []
        self.copies: list[Arrival] = []
        self._arrives = arrives

    def read(self, path: str) -> str:
        return path

    def load(self, slot: int, weights: str) -> Arrival:
        self.loads.append((slot, weights))
        self.copies.append(copy := Arrival())
        copy.come = self._arrives
        return copy


def adapters(count: int) -> list[Adapter]:
    return [Adapter(name, name) for name in "ABCDEF"[:count]]


def test_the_idle_adapter_that_was_used_least_recently_leaves_its_slot() -> None:
    store = Store(2)
    slots, (a, b, c) = AdapterSlots(store), adapters(3)
    for adapter in (a, b):
        assert slots.ready(adapter, 0, wait=False)
        slots.hold(adapter)
    slots.drop(a)
    slots.drop(b)
    slots.hold(a)
    slots.drop(a)  # b was used before a
    assert slots.ready(c, 0, wait=False)
    assert store.loads == [(1, "A"), (2, "B"), (2, "C")]
    assert (a.slot, b.slot, c.slot) == (1, 0, 2)


def test_an_adapter_that_rows_hold_never_leaves() -> None:
    slots, (a, b) = AdapterSlots(Store(1)), adapters(2)
    assert slots.ready(a, 0, wait=False)
    slots.hold(a)
    slots.hold(a)
    assert slots.news(wait=False)  # its copy is done
    slots.drop(a)
    assert not slots.ready(b, 1, wait=False)
    assert not slots.news(wait=False)
    slots.drop(a)
    assert slots.news(wait=False)
    assert slots.ready(b, 1, wait=False)
    with pytest.raises(ValueError, match="drop: no row has the adapter A"):
        slots.drop(a)


def test_behind_who_waits_for_a_slot_nobody_begins_with_an_adapter() -> None:
    """Else requests for the adapter in the slot could keep it there for ever."""
    slots, (a, b) = AdapterSlots(Store(1)), adapters(2)
    assert slots.ready(a, 1, wait=False)
    slots.hold(a)
    assert not slots.ready(b, 2, wait=False)
    assert not slots.ready(a, 3, wait=False)
    assert slots.ready(a, 0, wait=False)  # it comes before who waits
    slots.left()  # who waited has gone
    assert slots.news(wait=False)
    assert slots.ready(a, 3, wait=False)


def test_a_slot_is_ready_when_its_copy_is_done() -> None:
    store = Store(2, arrives=False)
    slots, (a, b, c) = AdapterSlots(store), adapters(3)
    assert not slots.ready(a, 0, wait=False)
    assert not slots.ready(b, 1, wait=False)
    assert not slots.ready(c, 2, wait=False)  # the copies are under way: neither slot is idle
    assert len(store.loads) == 2
    store.copies[1].come = True
    assert slots.news(wait=False)
    assert slots.ready(b, 1, wait=False)
    assert not slots.ready(a, 0, wait=False)
    assert slots.news(wait=True)
    assert slots.ready(a, 0, wait=False)


def test_all_who_wait_for_a_copy_hear_that_it_is_done() -> None:
    """Also where somebody who came later has found it out: while others come for the same adapter,
    its slot has no last row.
    """
    store = Store(1, arrives=False)
    slots, (a,) = AdapterSlots(store), adapters(1)
    assert not slots.ready(a, 0, wait=False)
    store.copies[0].come = True
    assert slots.ready(a, 1, wait=False)
    slots.hold(a)
    assert slots.news(wait=False)
    assert not slots.news(wait=False)


def test_where_no_row_is_held_copies_are_waited_for() -> None:
    slots, (a, b) = AdapterSlots(Store(1, arrives=False)), adapters(2)
    assert not slots.ready(a, 0, wait=False)
    assert slots.ready(b, 1, wait=True)  # a came, and left
    assert (a.slot, b.slot) == (0, 1)
