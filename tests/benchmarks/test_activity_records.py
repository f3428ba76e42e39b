"""Counting from CUPTI's activity records, with a stand-in for CUPTI that has some to give: there
need not be a driver.
"""

import ctypes
from typing import Any

import pytest

from benchmarks.common import activity_records
from benchmarks.common.activity_records import (
    BUFFER_BYTES,
    DRIVER,
    MEMCPY,
    RUNTIME,
    ActivityRecords,
    ApiRecord,
    Call,
    CopyRecord,
    outermost,
)
from benchmarks.common.api_counter import CuptiError
from photon_ext.observe.api import CallKind

NAMES = {
    (2, 1): b"cudaGraphLaunch_v10000",
    (2, 2): b"cudaEventSynchronize_v3020",
    (2, 3): b"cudaDeviceSynchronize_v3020",
    (2, 4): b"cudaEventQuery_v3020",
    (1, 1): b"cuGraphLaunch",
    (1, 2): b"cuEventQuery",
}
COPY_BYTES = 96  # of CUpti_ActivityMemcpy6


def api(kind: int, cbid: int, start: int, end: int, thread: int = 7) -> bytes:
    return bytes(ApiRecord(kind, cbid, start, end, 1, thread, 0, 0))


def copy(direction: int, source: int, target: int, nbytes: int) -> bytes:
    return bytes(CopyRecord(MEMCPY, direction, source, target, 0, nbytes)).ljust(COPY_BYTES, b"\0")


class Cupti:
    """libcupti as far as it is used; its clock says 100 at the beginning and 200 at the end."""

    def __init__(self, *records: bytes, dropped: int = 0, refuses: str = "") -> None:
        self.records, self.dropped, self.refuses = records, dropped, refuses
        self.enabled: set[int] = set()
        self.silenced: list[tuple[str, int]] = []
        self.times = iter((100, 200))

    def cuptiActivityRegisterCallbacks(self, request: Any, complete: Any) -> int:
        self.request, self.complete = request, complete
        return 0

    def cuptiActivityEnable(self, kind: int) -> int:
        self.enabled.add(kind)
        return 999 if self.refuses == "enable" else 0

    def cuptiActivityEnableDriverApi(self, cbid: int, enable: int) -> int:
        assert (DRIVER in self.enabled, enable) == (True, 0)
        self.silenced.append(("driver", cbid))
        return 0

    def cuptiActivityEnableRuntimeApi(self, cbid: int, enable: int) -> int:
        assert (RUNTIME in self.enabled, enable) == (True, 0)
        self.silenced.append(("runtime", cbid))
        return 0

    def cuptiActivityDisable(self, kind: int) -> int:
        self.enabled.remove(kind)
        return 0

    def cuptiActivityFlushAll(self, flag: int) -> int:
        """Two records a buffer."""
        for i in range(0, len(self.records), 2):
            buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(9)
            self.request(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
            assert (size.value, most.value, (buffer.value or 1) % 8) == (BUFFER_BYTES, 0, 0)
            data = b"".join(self.records[i : i + 2])
            ctypes.memmove(buffer, data, len(data))
            self.complete(None, 0, buffer, size, len(data))
        self.records = ()
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, size: Any, record: Any) -> int:
        at = record._obj
        sizes = {MEMCPY: COPY_BYTES, DRIVER: 40, RUNTIME: 40}
        after = (
            buffer.value
            if at.value is None
            else at.value + sizes[ctypes.c_uint32.from_address(at.value).value]
        )
        if after >= buffer.value + size.value:
            return 12
        at.value = after
        return 0

    def cuptiActivityGetNumDroppedRecords(self, context: object, stream: int, dropped: Any) -> int:
        dropped._obj.value = self.dropped
        return 0

    def cuptiGetTimestamp(self, time: Any) -> int:
        time._obj.value = next(self.times)
        return 0

    def cuptiGetCallbackName(self, domain: int, cbid: int, name: Any) -> int:
        name._obj.value = NAMES.get((domain, cbid))
        return 0 if (domain, cbid) in NAMES else 1

    def cuptiGetResultString(self, result: int, text: Any) -> int:
        text._obj.value = b"CUPTI_ERROR_UNKNOWN"
        return 0


def recorded(monkeypatch: pytest.MonkeyPatch, cupti: Cupti) -> ActivityRecords:
    monkeypatch.setattr(activity_records, "load_cupti", lambda: cupti)
    with ActivityRecords(lambda: None) as records:
        assert cupti.enabled == {MEMCPY, DRIVER, RUNTIME}
        assert cupti.silenced == [("driver", 2), ("runtime", 4)]  # the polls of a spinning wait
    assert not cupti.enabled
    return records


def test_calls_inside_are_counted_and_those_of_other_calls_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupti = Cupti(
        api(RUNTIME, 3, 90, 99),  # before
        api(DRIVER, 1, 111, 119),  # of the launch that follows
        api(RUNTIME, 1, 110, 120),
        api(RUNTIME, 2, 112, 118, thread=8),  # another thread's, meanwhile
        api(DRIVER, 1, 130, 140),  # of its own
        api(RUNTIME, 3, 205, 210),  # the wait for the device at the end
    )
    counts = recorded(monkeypatch, cupti).counts(2)
    assert dict(counts.calls) == {
        "cudaGraphLaunch": 1,
        "cudaEventSynchronize": 1,
        "cuGraphLaunch": 1,
    }
    assert counts.of(CallKind.GRAPH_LAUNCH) == 2
    assert counts.steps == 2


def test_copies_have_their_direction_memory_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cupti = Cupti(
        copy(1, 1, 3, 64),
        api(RUNTIME, 1, 110, 120),
        copy(1, 2, 3, 5),
        copy(2, 3, 2, 7),
        copy(2, 3, 2, 1),
    )
    counts = recorded(monkeypatch, cupti).counts(1)
    assert dict(counts.copies) == {
        "HtoD Pageable -> Device": 1,
        "HtoD Pinned -> Device": 1,
        "DtoH Device -> Pinned": 2,
    }
    assert dict(counts.copied_bytes) == {
        "HtoD Pageable -> Device": 64,
        "HtoD Pinned -> Device": 5,
        "DtoH Device -> Pinned": 8,
    }
    assert (counts.pageable, counts.host_to_device, counts.host_to_device_bytes) == (1, 2, 69)
    assert activity_records._BUFFERS._held == []


def test_lost_records_and_refusals_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CuptiError, match="dropped 3 records"):
        recorded(monkeypatch, Cupti(dropped=3))
    with pytest.raises(CuptiError, match=r"cuptiActivityEnable: CUPTI_ERROR_UNKNOWN \(999\)"):
        recorded(monkeypatch, Cupti(refuses="enable"))


def test_the_outer_of_two_calls_that_begin_together_counts() -> None:
    outer, inner, after = (
        Call(1, 10, -30, RUNTIME, 1),
        Call(1, 10, -20, DRIVER, 1),
        Call(1, 30, -40, RUNTIME, 2),
    )
    assert list(outermost([after, inner, outer])) == [outer, after]
