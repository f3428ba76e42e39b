"""What start-up made is left out of garbage collection until the last one that asked for it
ends; who runs the collector is let be.
"""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from photon_ext.runtime import heap_freeze
from photon_ext.runtime.heap_freeze import HeapFreeze, is_enabled, no_collection

# objects: what is set aside loses a few by itself, as they are freed, so a handful more or less
# shows nothing
MANY = 1000


class Cycle:
    """Garbage as soon as it is dropped."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _nothing_held(collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with nothing set aside, also after one that failed and released nothing."""
    monkeypatch.setattr(heap_freeze, "_held", set())


def test_what_is_there_is_not_looked_at_and_what_comes_later_is() -> None:
    old = Cycle()
    freeze, young = HeapFreeze(), Cycle()
    found = weakref.ref(old), weakref.ref(young)
    del old, young
    gc.collect()
    assert [ref() is None for ref in found] == [False, True]
    freeze.release()
    gc.collect()
    assert found[0]() is None


def test_garbage_is_collected_first_unless_the_caller_has_done_so() -> None:
    for collect in (True, False):
        cycle = Cycle()
        found = weakref.ref(cycle)
        del cycle
        freeze = HeapFreeze(collect)
        gc.collect()
        assert (found() is None) is collect
        freeze.release()


def test_the_last_release_counts_and_each_only_once() -> None:
    first, between = HeapFreeze(), [Cycle() for _ in range(MANY)]
    frozen, second = gc.get_freeze_count(), HeapFreeze()
    assert gc.get_freeze_count() > frozen + MANY / 2, (
        "the second sets aside what came since the first"
    )
    first.release()
    first.release()
    assert gc.get_freeze_count() > frozen + MANY / 2
    assert not any(each is between for each in gc.get_objects())
    second.release()
    assert gc.get_freeze_count() == 0


def test_a_freeze_of_the_application_stays_its_own() -> None:
    gc.freeze()
    frozen, later = gc.get_freeze_count(), [Cycle() for _ in range(MANY)]
    freeze = HeapFreeze()
    assert gc.get_freeze_count() < frozen + MANY / 2, "nothing was added"
    assert any(each is later for each in gc.get_objects())
    freeze.release()
    assert gc.get_freeze_count() > 0


def test_a_collector_that_is_off_stays_alone() -> None:
    gc.disable()
    HeapFreeze().release()
    assert gc.get_freeze_count() == 0
    HeapFreeze()
    assert gc.get_freeze_count() == 0
    assert not gc.isenabled()


def test_a_release_from_within_a_collection_does_not_lock() -> None:
    """An engine in somebody's cycle ends while another one is made."""
    first, cycle = HeapFreeze(collect=False), Cycle()
    weakref.finalize(cycle, first.release)
    del cycle
    second = HeapFreeze()
    assert gc.get_freeze_count() > 0
    second.release()
    assert gc.get_freeze_count() == 0


def test_a_fork_goes_on_with_its_own() -> None:
    freeze = HeapFreeze()
    child = os.fork()
    if child == 0:
        HeapFreeze().release()
        os._exit(0 if gc.get_freeze_count() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    freeze.release()
    assert gc.get_freeze_count() == 0


def test_an_engine_that_is_made_while_another_captures_freezes_too() -> None:
    with no_collection(), no_collection():
        assert not gc.isenabled()
        freeze = HeapFreeze()
        assert gc.get_freeze_count()
    assert gc.isenabled()
    freeze.release()
    assert not gc.get_freeze_count()


def test_the_collector_stays_off_until_the_last_pause_ends() -> None:
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            assert not is_enabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
