"""The cuda backend, on a GPU: order, capture, torch's streams and graphs, pinned memory, and
independence from the default stream.
"""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from photon_ext import _C

pytestmark = pytest.mark.gpu

WORDS = 1024
SLEEP = 200_000_000  # GPU clock ticks: about a tenth of a second


def device_words(value: int = 0) -> torch.Tensor:
    words = torch.full((WORDS,), value, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    return words


def external(stream: _C.Stream) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(stream.handle)


def copy(
    stream: _C.Stream,
    target: torch.Tensor | _C.PinnedBuffer,
    source: torch.Tensor | _C.PinnedBuffer,
) -> None:
    target_ptr, source_ptr = (
        x.ptr if isinstance(x, _C.PinnedBuffer) else x.data_ptr() for x in (target, source)
    )
    stream.copy(target_ptr, source_ptr, WORDS * 4)


class Slot:
    def __init__(self, **options: bool) -> None:
        self.compute, self.in_copy, self.out_copy = (_C.Stream.create("cuda") for _ in range(3))
        self.buffers = [_C.PinnedBuffer(WORDS * 4, "cuda") for _ in range(3)]
        self.input, self.output, self.mask = map(memoryview, self.buffers)
        self.staged, self.result, self.masked = (device_words() for _ in range(3))
        memory = (self.staged, self.result, self.masked)
        transfers = [
            part
            for pair in zip(self.buffers, memory, strict=True)
            for part in (pair[0], pair[1].data_ptr())
        ]
        self.native = _C.DecodeSlot(
            self.compute, self.in_copy, self.out_copy, *transfers, **options
        )

    def capture(self, target: torch.Tensor, source: torch.Tensor) -> _C.Graph:
        self.compute.begin_capture()
        copy(self.compute, target, source)
        return self.compute.end_capture()


def test_the_build_sees_the_device():
    assert _C.cuda_compiled
    assert _C.cuda_device_count() == torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=r"cudaSetDevice: .*there is no device of that index"):
        _C.Stream.create("cuda", _C.cuda_device_count())


def test_copies_and_kernels_are_ordered_across_streams():
    first, second, event = _C.Stream.create("cuda"), _C.Stream.create("cuda"), _C.Event("cuda")
    source, target = device_words(), device_words()
    with torch.cuda.stream(external(first)):
        torch.cuda._sleep(SLEEP)
        source.fill_(7)
    first.record(event)
    second.wait(event)
    copy(second, target, source)
    assert not second.query()
    assert not event.query()
    second.synchronize()
    assert second.query()
    assert event.query()
    assert target.unique().tolist() == [7]


def test_timing_on_a_wrapped_torch_stream():
    torch_stream = torch.cuda.Stream()
    stream = _C.Stream.wrap(torch_stream.cuda_stream)
    assert stream.handle == torch_stream.cuda_stream
    begin, end = _C.Event("cuda", timing=True), _C.Event("cuda", timing=True, blocking=False)
    stream.record(begin)
    with torch.cuda.stream(torch_stream):
        torch.cuda._sleep(SLEEP)
    stream.record(end)
    end.synchronize()
    assert 10.0 < end.elapsed_ms(begin) < 2000.0
    del stream
    torch_stream.synchronize()  # a wrapped stream is torch's: it outlives the wrapper
    with pytest.raises(RuntimeError, match="cudaEventElapsedTime"):
        end.elapsed_ms(_C.Event("cuda"))


def test_a_copy_refuses_memory_that_is_not_page_locked():
    stream, target = _C.Stream.create("cuda"), device_words()
    with pytest.raises(ValueError, match=r"src 0x\w+ is host memory that is not page-locked"):
        copy(stream, target, torch.zeros(WORDS, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"dst 0x\w+ is host memory that is not page-locked"):
        copy(stream, torch.zeros(WORDS, dtype=torch.int32), target)
    pinned = torch.full((WORDS,), 3, dtype=torch.int32).pin_memory()
    copy(stream, target, pinned)
    stream.synchronize()
    assert target.unique().tolist() == [3]


def test_a_slot_refuses_device_memory_that_is_not_the_devices():
    slot = Slot()
    streams, buffer = (slot.compute, slot.in_copy, slot.out_copy), slot.buffers[0]
    pageable = torch.zeros(WORDS, dtype=torch.int32)
    with pytest.raises(ValueError, match="not page-locked"):
        _C.DecodeSlot(*streams, buffer, pageable.data_ptr(), buffer, slot.result.data_ptr())
    with pytest.raises(ValueError, match="a buffer is of backend 'host'"):
        _C.DecodeSlot(
            *streams,
            _C.PinnedBuffer(64, "host"),
            slot.staged.data_ptr(),
            buffer,
            slot.result.data_ptr(),
        )


def test_capture_records_and_replays():
    slot = Slot()
    graph = slot.capture(slot.result, slot.staged)
    assert graph.nodes == 1
    slot.staged.fill_(5)
    torch.cuda.synchronize()
    slot.compute.synchronize()
    assert slot.result.unique().tolist() == [0]
    slot.compute.launch(graph)
    slot.compute.synchronize()
    assert slot.result.unique().tolist() == [5]


def test_capture_refuses_events_and_the_default_stream():
    stream, event, source, target = (
        _C.Stream.create("cuda"),
        _C.Event("cuda"),
        device_words(),
        device_words(),
    )
    stream.begin_capture()
    for call in (
        lambda: stream.record(event),
        lambda: stream.wait(event),
        stream.synchronize,
        stream.query,
        stream.begin_capture,
    ):
        with pytest.raises(RuntimeError, match="not possible while the stream is capturing"):
            call()
    copy(stream, target, source)
    assert stream.end_capture().nodes == 1
    with pytest.raises(RuntimeError, match="the default stream cannot be captured"):
        _C.Stream.wrap(0).begin_capture()


def test_a_capture_that_synchronizes_fails_with_advice_and_leaves_the_stream_usable():
    stream, memory, target = _C.Stream.create("cuda"), device_words().add_(1), device_words()
    stream.begin_capture()
    with torch.cuda.stream(external(stream)):
        memory.add_(1)
        with pytest.raises(Exception, match="captur"):
            memory[0].item()
    with pytest.raises(
        RuntimeError, match=r"cudaStreamEndCapture: .*run the forward once before capture"
    ):
        stream.end_capture()
    copy(stream, target, memory)
    stream.synchronize()
    assert target.unique().tolist() == [1]


def test_a_graph_that_torch_captured_is_replayed_by_us():
    stream, memory = _C.Stream.create("cuda"), device_words(0).add_(1).mul_(1)
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured, stream=external(stream), capture_error_mode="thread_local"):
        memory.mul_(3)
        memory.add_(1)
    graph = _C.Graph.from_cuda(captured.raw_cuda_graph())
    graph.keep_alive(captured)
    assert graph.nodes == 2
    del captured
    gc.collect()
    for _ in range(3):
        stream.launch(graph)
    stream.synchronize()
    assert memory.unique().tolist() == [40]


def test_destroying_graphs_and_events_does_not_break_a_capture():
    slot = Slot()
    old, memory = slot.capture(slot.result, slot.staged), device_words().add_(-1).add_(1)
    slot.native.launch(old, WORDS, True, WORDS)
    other = _C.Stream.create("cuda")
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    # torch's own mode, "global": the strictest
    with torch.cuda.graph(captured, stream=external(other)):
        memory.add_(1)
        del old, slot
        gc.collect()
        memory.add_(1)
    graph = _C.Graph.from_cuda(captured.raw_cuda_graph())
    other.launch(graph)
    other.synchronize()
    assert memory.unique().tolist() == [2]


def test_a_slot_runs_steps_and_late_sampling():
    slot = Slot(timing=True)
    forward, sampling = (
        slot.capture(slot.result, slot.staged),
        slot.capture(slot.result, slot.masked),
    )
    for value in (11, 12):
        slot.input[0] = slot.input[WORDS - 1] = value
        slot.native.launch(forward, WORDS, True, WORDS)
        slot.native.wait()
        assert (slot.output[0], slot.output[WORDS - 1]) == (value, value)
    slot.native.launch(forward, 0, False, 0)
    slot.mask[0] = 99
    slot.native.finalize(sampling, WORDS, WORDS)
    slot.native.wait()
    begin, end = slot.native.span()
    end.synchronize()
    assert slot.output[0] == 99
    assert end.elapsed_ms(begin) > 0.0


def test_a_step_does_not_wait_for_the_default_stream():
    """Hazard 34: work on the default stream serializes everything, silently."""
    slot = Slot()
    graph = slot.capture(slot.result, slot.staged)
    slot.input[0] = 42
    default = torch.cuda.default_stream()
    torch.cuda._sleep(20 * SLEEP)
    slot.native.launch(graph, WORDS, True, WORDS)
    slot.native.wait()
    assert not default.query(), "the default stream ended first: the test shows nothing"
    assert slot.output[0] == 42
    torch.cuda.synchronize()


def test_two_slots_in_flight_deliver_their_own_outputs():
    compute, in_copy, out_copy = (_C.Stream.create("cuda") for _ in range(3))
    state, slots, graphs = device_words(), [], []
    for _ in range(2):
        buffers = [_C.PinnedBuffer(WORDS * 4, "cuda") for _ in range(2)]
        staged, result = device_words(), device_words()
        native = _C.DecodeSlot(
            compute, in_copy, out_copy, buffers[0], staged.data_ptr(), buffers[1], result.data_ptr()
        )
        with torch.cuda.stream(external(compute)):
            # first use of these kernels, outside the capture
            result.copy_(state.mul_(3).add_(staged))
            state.zero_()
            compute.begin_capture()
            result.copy_(state.mul_(3).add_(staged))
            graphs.append(compute.end_capture())
        slots.append((native, memoryview(buffers[0]), memoryview(buffers[1]), staged, result))
    expected = [0]
    for step in range(1000):
        expected.append((expected[-1] * 3 + step + 2**31) % 2**32 - 2**31)
    for step in range(1001):
        if step < 1000:
            slots[step % 2][1][0] = step
            slots[step % 2][0].launch(graphs[step % 2], WORDS, True, WORDS)
        if step > 0:
            native, _, output, *_ = slots[(step - 1) % 2]
            native.wait()
            assert output[0] == expected[step]


def test_cpu_functions_and_claims_on_a_cuda_stream():
    stream = _C.Stream.create("cuda")
    with pytest.raises(ValueError, match="C functions run on host and inline streams"):
        stream.enqueue(1, b"")
    with stream.claim() as claimed:
        assert claimed is stream


def test_the_process_ends_cleanly():
    program = """
import torch
from photon_ext import _C
stream = _C.Stream.create("cuda")
memory = torch.zeros(1024, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
stream.begin_capture()
stream.copy(memory.data_ptr(), memory.data_ptr() + 2048, 2048)
graph = stream.end_capture()
graph.keep_alive(memory)
for _ in range(100):
    stream.launch(graph)
print("end of the program")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "end of the program\n"), done.stderr
