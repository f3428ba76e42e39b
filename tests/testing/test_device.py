"""Streams, events and clocks of the simulated device, and the search over its schedules."""

from __future__ import annotations

from math import comb

import pytest

from photon_ext.testing import (
    Chooser,
    Counterexample,
    Eager,
    Lazy,
    SimDevice,
    SimEvent,
    SimRace,
    explore,
    replay,
    sample,
)
from photon_ext.testing.memory import Access


def write(access: Access) -> None:
    access.write("cell")


def read(access: Access) -> None:
    access.read("cell")


def nothing(access: Access) -> None:
    pass


@pytest.mark.parametrize(("first", "second"), [(write, read), (read, write), (write, write)])
def test_unordered_conflict_is_a_race_in_either_order(first: object, second: object) -> None:
    for chooser in (Lazy(), Eager()):
        device = SimDevice(chooser)
        device.compute.enqueue("one", first)  # type: ignore[arg-type]
        device.in_copy.enqueue("two", second)  # type: ignore[arg-type]
        with pytest.raises(SimRace, match="cell") as found:
            device.synchronize()
        assert "'one'" in str(found.value)
        assert "'two'" in str(found.value)


def test_two_reads_are_no_race() -> None:
    device = SimDevice(Lazy())
    device.compute.enqueue("one", read)
    device.in_copy.enqueue("two", read)
    device.synchronize()


def test_an_event_orders_two_streams() -> None:
    def scenario(chooser: Chooser) -> None:
        device = SimDevice(chooser)
        event = SimEvent()
        device.compute.enqueue("one", write)
        device.compute.record(event)
        device.in_copy.wait(event)
        device.in_copy.enqueue("two", write)
        device.host_point()
        device.synchronize()

    assert explore(scenario).exhausted


def test_one_stream_is_in_order() -> None:
    device = SimDevice(Lazy())
    device.compute.enqueue("one", write)
    device.compute.enqueue("two", write)
    device.synchronize()
    assert list(device.trace) == ["one", "two"]


def test_what_the_host_did_before_is_ordered_and_what_it_does_after_is_not() -> None:
    device = SimDevice(Eager())
    device.host_write("host", "cell")
    device.compute.enqueue("kernel", read)
    device.host_point()
    with pytest.raises(SimRace, match="'host' writes cell while 'kernel' reads it"):
        device.host_write("host", "cell")


def test_a_wait_orders_what_the_host_does_after_it() -> None:
    device = SimDevice(Lazy())
    event = SimEvent()
    device.compute.enqueue("kernel", write)
    device.compute.record(event)
    device.host_wait(event)
    device.host_write("host", "cell")
    assert device.host_waits == 1


def test_a_wait_means_the_latest_recording_at_its_call() -> None:
    device = SimDevice(Lazy())
    event = SimEvent()
    device.in_copy.wait(event)  # never recorded: holds nobody up
    device.in_copy.enqueue("free", nothing)
    device.compute.enqueue("first", nothing)
    device.compute.record(event)
    device.out_copy.wait(event)
    device.out_copy.enqueue("after first", nothing)
    device.compute.enqueue("second", nothing)
    device.compute.record(event)
    device.host_wait(event)
    assert list(device.trace) == ["first", "second"]
    device.synchronize()
    assert set(device.trace) == {"first", "second", "free", "after first"}
    assert device.idle


@pytest.mark.parametrize(("left", "right"), [(1, 1), (2, 3), (4, 4)])
def test_explore_runs_every_interleaving_once(left: int, right: int) -> None:
    seen: list[tuple[str, ...]] = []

    def scenario(chooser: Chooser) -> None:
        device = SimDevice(chooser)
        done = SimEvent()
        for i in range(left):
            device.compute.enqueue(f"a{i}", nothing)
        for i in range(right):
            device.in_copy.enqueue(f"b{i}", nothing)
        device.compute.record(done)
        device.out_copy.wait(done)
        done = SimEvent()
        device.in_copy.record(done)
        device.out_copy.wait(done)
        device.out_copy.enqueue("end", nothing)
        done = SimEvent()
        device.out_copy.record(done)
        device.host_wait(done)
        seen.append(tuple(device.trace))

    found = explore(scenario)
    assert found == (comb(left + right, left), True)
    assert len(set(seen)) == len(seen) == found.interleavings


def test_a_limit_stops_the_search() -> None:
    def scenario(chooser: Chooser) -> None:
        for _ in range(5):
            chooser.choose(3)

    assert explore(scenario, limit=10) == (10, False)
    assert explore(scenario) == (3**5, True)
    assert sample(scenario, 7) == (7, False)


def test_a_counterexample_can_be_replayed() -> None:
    def scenario(chooser: Chooser) -> None:
        taken = [chooser.choose(3) for _ in range(4)]
        assert taken != [2, 0, 1, 2]

    with pytest.raises(Counterexample, match=r"replay\(scenario, \[2, 0, 1, 2\]\)") as found:
        explore(scenario)
    assert found.value.choices == (2, 0, 1, 2)
    with pytest.raises(AssertionError):
        replay(scenario, found.value.choices)
    replay(scenario, (0, 0, 0, 0))
