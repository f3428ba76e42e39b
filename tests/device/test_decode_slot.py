"""DecodeSlot on CPU streams: one step is one call, one wait."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from photon_ext import _C


def zeros(words: int = 1) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32)


class Streams:
    def __init__(self, backend: str) -> None:
        self.compute, self.in_copy, self.out_copy = (_C.Stream.create(backend) for _ in range(3))


@dataclass
class Slot:
    """A slot with its device memory: 8 words in, 4 out, 2 of mask."""

    native: _C.DecodeSlot
    input: memoryview
    output: memoryview
    mask: memoryview
    staged: torch.Tensor
    result: torch.Tensor
    masked: torch.Tensor


def make_slot(streams: Streams, **options: bool) -> Slot:
    backend = streams.compute.backend
    input_, output, mask = (_C.PinnedBuffer(words * 4, backend) for words in (8, 4, 2))
    staged, result, masked = zeros(8), zeros(4), zeros(2)
    native = _C.DecodeSlot(
        streams.compute,
        streams.in_copy,
        streams.out_copy,
        input_,
        staged.data_ptr(),
        output,
        result.data_ptr(),
        mask,
        masked.data_ptr(),
        **options,
    )
    return Slot(
        native, memoryview(input_), memoryview(output), memoryview(mask), staged, result, masked
    )


def copy_into(stream: _C.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    stream.copy(target.data_ptr(), source.data_ptr(), 4)


def capture_copy(stream: _C.Stream, target: torch.Tensor, source: torch.Tensor) -> _C.Graph:
    stream.begin_capture()
    copy_into(stream, target, source)
    return stream.end_capture()


@pytest.fixture
def streams(backend: str) -> Streams:
    return Streams(backend)


def test_a_launch_copies_in_runs_and_copies_out(streams):
    slot = make_slot(streams)
    graph = capture_copy(streams.compute, slot.result, slot.staged)
    slot.input[0] = 42
    slot.native.launch(graph, 8, True, 4)
    slot.native.wait()
    assert slot.native.done()
    assert slot.output[0] == 42


def test_a_quiet_launch_sends_nothing(streams):
    slot = make_slot(streams)
    graph = capture_copy(streams.compute, slot.result, slot.staged)
    slot.input[0] = 1
    slot.native.launch(graph, 8, True, 4)
    slot.native.wait()
    slot.input[0] = 2
    slot.native.launch(graph, 0, True, 4)
    slot.native.wait()
    assert slot.output[0] == 1
    assert slot.staged[0] == 1


def test_begin_and_end_frame_kernels_without_a_graph(streams, kernels):
    slot = make_slot(streams)
    slot.input[0] = 5
    slot.native.begin(8)
    kernels.sleep(streams.compute, 500)
    copy_into(streams.compute, slot.result, slot.staged)
    kernels.multiply_add(streams.compute, slot.result, 10, 1)
    slot.native.end(4)
    slot.native.wait()
    assert slot.output[0] == 51


def test_finalize_sends_the_mask_and_samples_late(streams):
    slot = make_slot(streams)
    forward = capture_copy(streams.compute, slot.result, slot.staged)
    sampling = capture_copy(streams.compute, slot.result, slot.masked)
    slot.input[0] = 5
    slot.native.launch(forward, 8, False, 0)
    assert not slot.native.done()
    with pytest.raises(RuntimeError, match="not finished; call end or finalize first"):
        slot.native.wait()
    slot.mask[0] = 99
    slot.native.finalize(sampling, 2, 4)
    slot.native.wait()
    assert slot.output[0] == 99
    slot.native.launch(forward, 0, False, 0)
    slot.native.finalize(None, 0, 4)
    slot.native.wait()
    assert slot.output[0] == 5


def test_spans_alternate_between_two_pairs(streams, kernels):
    slot = make_slot(streams, timing=True)
    with pytest.raises(RuntimeError, match="nothing was launched"):
        slot.native.span()
    spans = []
    for _ in range(3):
        slot.native.begin(0)
        kernels.sleep(streams.compute, 3000)
        slot.native.end(4)
        slot.native.wait()
        spans.append(slot.native.span())
        begin, end = spans[-1]
        assert 3.0 <= end.elapsed_ms(begin) < 1000.0
    assert spans[0][0] is spans[2][0]
    assert spans[0][1] is spans[2][1]
    assert spans[0][0] is not spans[1][0]
    gap = spans[2][0].elapsed_ms(spans[1][1])
    assert 0.0 <= gap < 1000.0


def test_a_span_ends_with_the_late_sampling(streams, kernels):
    slot = make_slot(streams, timing=True)
    streams.compute.begin_capture()
    kernels.sleep(streams.compute, 5000)
    sampling = streams.compute.end_capture()
    slot.native.begin(0)
    slot.native.end(0, finish=False)
    slot.native.finalize(sampling, 0, 4)
    slot.native.wait()
    begin, end = slot.native.span()
    assert end.elapsed_ms(begin) >= 5.0


def test_two_slots_keep_their_order_under_random_delays(kernels):
    """Thousands of ping-pong steps: each step's output is that of its own launch, whatever the
    workers' timing.
    """
    rng, streams, state = random.Random(0), Streams("host"), zeros()
    slots = [make_slot(streams) for _ in range(2)]
    graphs = []
    for slot in slots:  # state = state * 3 + 1; the outputs are the state and the staged number
        streams.compute.begin_capture()
        kernels.multiply_add(streams.compute, state, 3, 1)
        copy_into(streams.compute, slot.result, state)
        streams.compute.copy(slot.result.data_ptr() + 4, slot.staged.data_ptr(), 4)
        graphs.append(streams.compute.end_capture())

    in_flight: deque[tuple[Slot, tuple[int, int]]] = deque()

    def commit_oldest() -> None:
        slot, outputs = in_flight.popleft()
        slot.native.wait()
        assert tuple(slot.output)[:2] == outputs
        slot.output[0] = slot.output[1] = -1

    expected = 0
    for step in range(3000):
        if len(in_flight) == 2:
            commit_oldest()
        if rng.random() < 0.05:
            kernels.sleep(
                rng.choice((streams.compute, streams.in_copy, streams.out_copy)), rng.randrange(300)
            )
        slot, graph = slots[step % 2], graphs[step % 2]
        slot.input[0] = step
        slot.native.launch(graph, 8, True, 4)
        expected = (expected * 3 + 1 + 2**31) % 2**32 - 2**31
        in_flight.append((slot, (expected, step)))
    commit_oldest()
    commit_oldest()


def test_waiting_for_a_step_releases_the_gil(kernels, flag):
    streams = Streams("host")
    slot = make_slot(streams)
    slot.native.begin(0)
    kernels.wait_for_flag(streams.compute, flag)
    slot.native.end(4)
    assert not slot.native.done()
    helper = threading.Timer(0.02, lambda: flag.fill_(1))
    helper.start()
    slot.native.wait()
    helper.join()
    assert slot.native.done()


def test_a_workers_error_is_raised_by_the_wait(kernels):
    streams = Streams("host")
    slot, other = make_slot(streams), make_slot(streams)
    slot.native.begin(0)
    kernels.fail(streams.compute)
    slot.native.end(4)
    with pytest.raises(RuntimeError, match="the kernel's own words"):
        slot.native.wait()
    other.native.begin(0)
    other.native.end(4)
    with pytest.raises(RuntimeError, match="the kernel's own words"):
        other.native.wait()


def test_a_call_that_failed_half_way_is_neither_waited_for_nor_tried_again(kernels, flag):
    """The graph is in flight on another stream.

    What the slot's last step left in pinned memory is no result of this one.
    """
    streams, other = Streams("host"), _C.Stream.create("host")
    slot = make_slot(streams)
    graph = capture_copy(streams.compute, slot.result, slot.staged)
    slot.native.begin(0)
    slot.native.end(4)
    slot.native.wait()
    kernels.wait_for_flag(other, flag)
    other.launch(graph)
    try:
        with pytest.raises(RuntimeError, match="still in flight"):
            slot.native.launch(graph, 8, True, 4)
        assert not slot.native.done()
        with pytest.raises(RuntimeError, match="nothing was launched"):
            slot.native.wait()
        slot.native.begin(0)
        slot.native.end(0, finish=False)
        with pytest.raises(RuntimeError, match="still in flight"):
            slot.native.finalize(graph, 2, 4)
        with pytest.raises(
            RuntimeError, match="there is no launch or end with finish=False to finalize"
        ):
            slot.native.finalize(None, 2, 4)
    finally:
        flag.fill_(1)
        other.synchronize()


def test_destroying_a_slot_waits_for_its_copies(kernels, flag):
    streams = Streams("host")
    slot = make_slot(streams)
    result, output = slot.result, slot.output
    result[0] = 3
    slot.native.begin(0)
    kernels.wait_for_flag(streams.compute, flag)
    slot.native.end(4)
    helper = threading.Timer(0.02, lambda: flag.fill_(1))
    helper.start()
    del slot
    assert output[0] == 3
    helper.join()


def test_misuse_names_the_value_and_the_limit(streams):
    slot = make_slot(streams)
    graph = capture_copy(streams.compute, slot.result, slot.staged)
    native = slot.native
    with pytest.raises(RuntimeError, match="wait: nothing was launched"):
        native.wait()
    with pytest.raises(RuntimeError, match="span: the slot was created without timing"):
        native.span()
    with pytest.raises(
        ValueError, match="launch: input_words is 9, the input buffer holds 8 words"
    ):
        native.launch(graph, 9, True, 4)
    with pytest.raises(
        ValueError, match="launch: output_words is 5, the output buffer holds 4 words"
    ):
        native.launch(graph, 0, True, 5)
    with pytest.raises(ValueError, match="begin: input_words is -1"):
        native.begin(-1)
    with pytest.raises(ValueError, match="graph is None; without a graph use begin and end"):
        native.launch(None, 0, True, 4)
    with pytest.raises(RuntimeError, match="end: there was no begin"):
        native.end(4)
    with pytest.raises(RuntimeError, match="finalize: there is no launch or end with finish=False"):
        native.finalize(None, 0, 4)
    native.begin(0)
    for call in (lambda: native.begin(0), lambda: native.launch(graph, 0, True, 4)):
        with pytest.raises(RuntimeError, match="a begin has no end yet"):
            call()
    native.end(0, finish=False)
    with pytest.raises(RuntimeError, match="was not finalized"):
        native.launch(graph, 0, True, 4)
    with pytest.raises(
        ValueError, match="finalize: mask_words is 3, the mask buffer holds 2 words"
    ):
        native.finalize(None, 3, 4)
    native.finalize(None, 2, 4)
    native.wait()


def test_a_slot_checks_its_parts_when_it_is_made(backend, streams):
    other = _C.Stream.create("inline" if backend == "host" else "host")
    buffer, memory = _C.PinnedBuffer(16, backend), zeros(4)
    with pytest.raises(ValueError, match="a copy stream of backend"):
        _C.DecodeSlot(
            streams.compute,
            other,
            streams.out_copy,
            buffer,
            memory.data_ptr(),
            buffer,
            memory.data_ptr(),
        )
    with pytest.raises(ValueError, match="null address"):
        _C.DecodeSlot(
            streams.compute, streams.in_copy, streams.out_copy, buffer, 0, buffer, memory.data_ptr()
        )
    slot = _C.DecodeSlot(
        streams.compute,
        streams.in_copy,
        streams.out_copy,
        buffer,
        memory.data_ptr(),
        buffer,
        memory.data_ptr(),
    )
    slot.begin(0)
    slot.end(0, finish=False)
    with pytest.raises(ValueError, match="mask_words is 1, the mask buffer holds 0 words"):
        slot.finalize(None, 1, 0)
