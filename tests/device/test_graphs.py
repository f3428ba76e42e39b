"""Capture and replay on CPU streams."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from photon_ext import _C


def zeros(words: int = 1) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32)


def capture_step(stream, kernels, value, seen):
    stream.begin_capture()
    kernels.multiply_add(stream, value, 2, 1)
    stream.copy(seen.data_ptr(), value.data_ptr(), 4)
    return stream.end_capture()


def test_capture_records_and_does_not_execute(stream, kernels):
    value, seen = zeros(), zeros()
    graph = capture_step(stream, kernels, value, seen)
    stream.synchronize()
    assert graph.nodes == 2
    assert (value.item(), seen.item()) == (0, 0)
    for _ in range(5):
        stream.launch(graph)
    stream.synchronize()
    assert (value.item(), seen.item()) == (31, 31)


def test_replays_read_memory_at_replay_time(stream, kernels):
    value, seen = zeros(), zeros()
    graph = capture_step(stream, kernels, value, seen)
    for start in (10, -3):
        value[0] = start
        stream.launch(graph)
        stream.synchronize()
        assert seen.item() == 2 * start + 1


def test_a_graph_is_replayed_on_any_stream_of_its_backend(backend, stream, kernels):
    value, seen = zeros(), zeros()
    graph = capture_step(stream, kernels, value, seen)
    other = _C.Stream.create(backend)
    stream.launch(graph)
    stream.synchronize()
    other.launch(graph)
    other.synchronize()
    assert seen.item() == 3


def test_a_graph_in_flight_on_one_stream_is_refused_on_another(kernels, flag):
    first, second = _C.Stream.create("host"), _C.Stream.create("host")
    first.begin_capture()
    kernels.wait_for_flag(first, flag)
    graph = first.end_capture()
    first.launch(graph)
    with pytest.raises(RuntimeError, match=r"launch: .*on another stream, still in flight"):
        second.launch(graph)
    flag[0] = 1
    first.synchronize()


def test_no_event_of_the_hosts_inside_captures(backend, stream, kernels):
    event, value = _C.Event(backend), zeros()
    graph = capture_step(stream, kernels, value, zeros())
    stream.begin_capture()
    calls = (
        lambda: stream.record(event),
        lambda: stream.wait(event),
        stream.synchronize,
        stream.query,
        stream.begin_capture,
        lambda: stream.launch(graph),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="not possible while the stream is capturing"):
            call()
    kernels.multiply_add(stream, value, 1, 1)
    graph = stream.end_capture()
    stream.launch(graph)
    stream.synchronize()
    assert (graph.nodes, value.item()) == (1, 1)


def test_capture_must_be_begun(stream):
    with pytest.raises(RuntimeError, match="not capturing; call begin_capture first"):
        stream.end_capture()


def test_an_empty_graph_can_be_replayed(stream):
    stream.begin_capture()
    graph = stream.end_capture()
    stream.launch(graph)
    stream.synchronize()
    assert graph.nodes == 0


def test_a_graph_outlives_its_replays_in_flight(kernels, flag):
    """Dropping the graph waits for the replay, and only then lets go of what it kept alive."""

    class Memory:
        def __init__(self) -> None:
            self.cell = zeros()

    stream, memory = _C.Stream.create("host"), Memory()
    cell, alive = memory.cell, weakref.ref(memory)
    stream.begin_capture()
    kernels.wait_for_flag(stream, flag)
    kernels.multiply_add(stream, cell, 1, 7)
    graph = stream.end_capture()
    graph.keep_alive(memory)
    del memory
    stream.launch(graph)
    assert alive() is not None

    seen: list[int] = []
    helper = threading.Timer(0.02, lambda: (seen.append(int(alive() is not None)), flag.fill_(1)))
    helper.start()
    del graph
    helper.join()
    assert cell.item() == 7
    assert seen == [1], "the memory was let go while the replay still used it"
    assert alive() is None


def test_an_error_inside_a_replay_sticks(kernels):
    stream, value = _C.Stream.create("host"), zeros()
    stream.begin_capture()
    kernels.multiply_add(stream, value, 1, 1)
    kernels.fail(stream)
    kernels.multiply_add(stream, value, 1, 1)
    graph = stream.end_capture()
    stream.launch(graph)
    stream.launch(graph)
    with pytest.raises(
        RuntimeError, match="a kernel of a replayed graph failed: the kernel's own words"
    ):
        stream.synchronize()
    assert value.item() == 1


def test_an_error_inside_an_inline_replay_leaves_the_graph_usable(kernels):
    """It is not in flight any more: any stream may take it, and its end waits for nothing."""
    streams, value = [_C.Stream.create("inline") for _ in range(2)], zeros()
    streams[0].begin_capture()
    kernels.multiply_add(streams[0], value, 1, 1)
    kernels.fail(streams[0])
    graph = streams[0].end_capture()
    for stream in streams:
        with pytest.raises(RuntimeError, match="the kernel's own words"):
            stream.launch(graph)
    assert value.item() == 2


def test_graphs_of_another_backend_are_refused():
    host, inline = _C.Stream.create("host"), _C.Stream.create("inline")
    host.begin_capture()
    graph = host.end_capture()
    with pytest.raises(ValueError, match="of backend 'inline', the argument of backend 'host'"):
        inline.launch(graph)
    with pytest.raises(ValueError, match="handle is 0"):
        _C.Graph.from_cuda(0)
