"""From torch.profiler's Chrome trace to records, on hand-made documents, and on one made here."""

from __future__ import annotations

import threading

import pytest
import torch

from photon_ext.observe.clock_sync import Bracket, Converter, Offset, find_offset, make_marks
from photon_ext.observe.kineto import KinetoRecords, Recorder, decode, outermost, parse
from photon_ext.observe.records import ApiCall, DeviceKind, DeviceSpan, OpKind
from tests.observe.kineto_records import BASE, COMPUTE, PID, Document


def recorded(body: object) -> KinetoRecords:
    recorder = Recorder(ops=True, stacks=False)
    recorder.start()
    body()  # type: ignore[operator]
    return recorder.stop({})


def test_kernels_copies_and_calls_are_told_apart_and_sorted() -> None:
    document = Document()
    launch = document.call("cudaGraphLaunch", 1, 9)
    document.call("cuGraphLaunch", 2, 8, "cuda_driver")  # inside the other
    document.call("cuMemcpyHtoDAsync_v2", 10, 12, "cuda_driver")
    document.kernel("linear_kernel", 20, 30.5, launch)
    document.copy("HtoD (Pageable -> Device)", 14, 15, 3, 21, 4096)
    document.add("gpu_memset", "Memset (Device)", 16, 17, COMPUTE, correlation=9, bytes=64)
    document.add("cuda_sync", "Stream Sync", 1, 2, COMPUTE)
    document.add("overhead", "Buffer Flush", 1, 2, 0)
    document.op("aten::add", 0, 1)
    document.op("my range", 0, 2, "user_annotation")
    found = parse(document.json())
    calls = [(call.name, call.correlation) for call in found.calls]
    assert calls == [("cudaGraphLaunch", 1), ("cuMemcpyHtoDAsync", 3)]
    copy, fill, kernel = found.device
    span = (BASE + 20_000, BASE + 30_500)
    assert kernel == DeviceSpan("linear_kernel", DeviceKind.KERNEL, *span, COMPUTE, launch)
    assert (copy.name, copy.bytes, copy.stream) == ("HtoD Pageable -> Device", 4096, 21)
    assert copy.is_pageable
    assert copy.is_in_copy
    assert fill.kind is DeviceKind.FILL
    ops = {(op.name, op.kind) for op in found.ops}
    assert ops == {("aten::add", OpKind.TORCH), ("my range", OpKind.ANNOTATION)}


def test_threads_that_cupti_names_by_their_pthread_id_are_found() -> None:
    """It keeps the low 32 bits, with a sign."""
    document = Document()
    low = 0x7F12_F00D_1234 & 0xFFFFFFFF
    document.add("cuda_runtime", "cudaGraphLaunch", 0, 1, low - 2**32, correlation=1)
    assert [call.thread for call in parse(document.json(), {low: PID}).calls] == [PID]


@pytest.mark.parametrize("name", ['say "hi"', '"', 'a",', '", ', "it's", "a\tb", 'a\t"b"\x01'])
@pytest.mark.parametrize(
    "written",
    [
        '{"cat": "user_annotation", "name": "%s", "pid": 1, "tid": "a",\n"ts": 0}',
        '{\n"name": "%s",\n"ts": 0}',
        '{"name": "%s"\n}',
    ],
)
def test_a_quote_in_a_name_is_read_as_torch_writes_it(written: str, name: str) -> None:
    assert decode(written % name)["name"] == name


def test_a_range_may_have_a_quote_in_its_name() -> None:
    def body() -> None:
        with torch.profiler.record_function('the "inner" loop'):
            torch.ones(3)

    assert 'the "inner" loop' in [op.name for op in recorded(body).ops]


def test_outermost_is_judged_per_thread() -> None:
    spans = [("cudaA", 0, 100, 1), ("cuA", 10, 90, 1), ("cuB", 20, 30, 2), ("cudaC", 100, 110, 1)]
    names = [call.name for call in outermost(ApiCall(*span) for span in spans)]
    assert names == ["cudaA", "cuB", "cudaC"]


def test_a_sync_mark_bounds_the_offset_from_both_sides() -> None:
    """Our clock reads 1000 when the profiler's reads 51000, and more."""
    brackets = [Bracket(1000, 1400), Bracket(2000, 2100)]
    offset = find_offset(brackets, [(51_120, 51_300), (52_010, 52_080)])
    assert offset is not None
    low, high = max(51_300 - 1400, 52_080 - 2100), min(51_120 - 1000, 52_010 - 2000)
    assert low <= 50_000 <= high
    assert (offset.value, offset.error) == ((low + high) // 2, (high - low + 1) // 2)


def test_sync_marks_that_were_lost_give_no_offset() -> None:
    assert find_offset([Bracket(0, 1)], []) is None
    assert find_offset([], []) is None


def test_drift_is_corrected_linearly() -> None:
    to_ours = Converter(Offset(1000, 5, 0), Offset(1100, 7, 100_000))
    assert (to_ours.error, to_ours.drift) == (7, 100)
    assert [to_ours(time) for time in (1000, 51_050, 101_100)] == [0, 50_000, 100_000]


def test_the_clocks_of_this_machine_agree_to_microseconds() -> None:
    brackets: list[list[Bracket]] = []
    marks = recorded(lambda: brackets.extend(make_marks() for _ in range(2))).marks
    half = len(brackets[0])
    first, last = find_offset(brackets[0], marks[:half]), find_offset(brackets[1], marks[half:])
    assert first is not None
    assert last is not None
    assert first.error < 50_000
    assert abs(first.value - last.value) <= first.error + last.error + 50_000


def test_ops_of_all_threads_are_recorded() -> None:
    thread = threading.Thread(target=lambda: torch.ones(4).sum().item())

    def body() -> None:
        thread.start()
        thread.join()
        torch.ones(4).add(1)

    ops = {(op.name, op.thread) for op in recorded(body).ops}
    here = threading.get_native_id()
    assert ops >= {("aten::sum", thread.native_id), ("aten::item", thread.native_id)}
    assert ("aten::add", here) in ops


def test_without_anything_to_record_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorder = Recorder(ops=False, stacks=False)
    recorder.start()
    assert recorder.stop({}) == ([], [], [], [])
