"""The trace of the host and inline streams: what ran, where, when; bounded, and off by default."""

from __future__ import annotations

import struct
import time
from itertools import pairwise

import pytest
import torch

from photon_ext import _C, ops
from tests.device.conftest import Kernels

Record = tuple[str, str | None, int, int, int, int, int]


def recorded(capacity: int, body: object) -> tuple[list[Record], int]:
    _C.start_host_trace(capacity)
    try:
        body()  # type: ignore[operator]
    finally:
        found = _C.stop_host_trace()
    return found


def test_kernels_copies_and_waits_are_recorded_in_order(kernels: Kernels) -> None:
    stream, other, event = _C.Stream.create("host"), _C.Stream.create("host"), _C.Event("host")
    source, target = torch.ones(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    def body() -> None:
        kernels.sleep(stream, 3000)
        stream.copy(target.data_ptr(), source.data_ptr(), 16)
        stream.record(event)
        other.wait(event)
        kernels.sleep(other, 1)
        other.synchronize()

    before = time.perf_counter_ns()
    found, dropped = recorded(100, body)
    after = time.perf_counter_ns()
    assert dropped == 0
    mine = [record for record in found if record[2] == stream.id]
    assert [(work, name, size) for work, name, _, _, _, size, _ in mine] == [
        ("kernel", None, 0),
        ("copy", None, 16),
    ]
    assert mine[0][4] - mine[0][3] >= 3_000_000
    assert mine[0][6] < 1_500_000  # of processor time: it slept
    assert [work for work, _, number, *_ in found if number == other.id] == ["wait", "kernel"]
    # on the clock of perf_counter_ns
    assert all(before <= begin <= end <= after for *_, begin, end, _, _ in found)
    waited = next(record for record in found if record[0] == "wait")
    assert waited[4] >= mine[1][4]  # until the other stream had got so far
    assert all(
        first[4] <= second[3]
        for first, second in pairwise(sorted(mine, key=lambda record: record[3]))
    )


@pytest.mark.parametrize("backend", ["host", "inline"])
def test_the_ops_inside_a_replay_are_known_by_name(backend: str) -> None:
    stream = _C.Stream.create(backend)
    out, x, weight = torch.empty(2, 8), torch.ones(2, 8), torch.ones(8)
    stream.begin_capture()
    with stream.claim():
        ops.rms_norm_into(out, x, weight, 0.0)
        ops.linear_into(out, x, torch.eye(8))
    graph = stream.end_capture()

    def body() -> None:
        stream.launch(graph)
        stream.launch(graph)
        stream.synchronize()

    found, _ = recorded(100, body)
    kernels = [name for work, name, *_ in found if work == "kernel"]
    assert kernels == ["rms_norm_into", "linear_into"] * 2
    replays = [record for record in found if record[0] == "graph"]
    assert [record[5] for record in replays] == [2, 2]  # nodes
    for work, _, number, begin, end, _, cpu in found:
        assert number == stream.id
        assert 0 <= cpu <= end - begin + 1_000_000
        assert work == "graph" or any(replay[3] <= begin <= end <= replay[4] for replay in replays)


def test_it_is_bounded_and_counts_what_it_drops(kernels: Kernels) -> None:
    stream = _C.Stream.create("host")

    def body() -> None:
        for _ in range(25):
            kernels.sleep(stream, 0)
        stream.synchronize()

    found, dropped = recorded(10, body)
    assert (len(found), dropped) == (10, 15)


def test_off_it_records_nothing(kernels: Kernels) -> None:
    stream = _C.Stream.create("host")
    kernels.sleep(stream, 0)
    stream.synchronize()
    assert recorded(10, lambda: None) == ([], 0)
    assert _C.stop_host_trace() == ([], 0)


def test_work_that_straddles_the_begin_is_left_out(kernels: Kernels, flag: torch.Tensor) -> None:
    stream = _C.Stream.create("host")
    kernels.hold(stream, flag)
    _C.start_host_trace(10)
    flag.fill_(1)
    stream.synchronize()
    assert _C.stop_host_trace() == ([], 0)


def test_one_at_a_time_and_room_for_something() -> None:
    _C.start_host_trace(1)
    try:
        with pytest.raises(RuntimeError, match="is on already"):
            _C.start_host_trace(1)
    finally:
        _C.stop_host_trace()
    for capacity in (0, -5):
        with pytest.raises(ValueError, match=f"capacity is {capacity}"):
            _C.start_host_trace(capacity)


def test_streams_have_numbers_of_their_own() -> None:
    streams = [_C.Stream.create(backend) for backend in ("host", "inline", "host")]
    assert len({stream.id for stream in streams}) == 3
    assert all(stream.id > 0 for stream in streams)


def test_a_kernel_that_fails_is_recorded_and_the_stream_goes_on_failing(kernels: Kernels) -> None:
    stream = _C.Stream.create("host")

    def body() -> None:
        kernels.fail(stream)
        stream.enqueue(kernels.address("sleep_us"), struct.pack("q", 0))  # skipped
        with pytest.raises(RuntimeError):
            stream.synchronize()

    found, _ = recorded(10, body)
    assert [work for work, *_ in found] == ["kernel", "kernel"]
