"""CUDA API calls and copies counted from CUPTI's activity records, through ctypes.

Kernels are not recorded, nor is a wait's polling: the nodes of a graph run as they do unobserved,
and there is little to read. torch.profiler takes such records to itself; count before it is first
used in the process, or without it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, takewhile
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.common.api_counter import DRIVER_API, RUNTIME_API, CuptiError, load_cupti
from benchmarks.common.calls import Counts
from photon_ext.observe.api import plain_name

# Numbers of cupti_activity.h and cupti_result.h (CUDA 11 to 13).
MEMCPY, DRIVER, RUNTIME = 1, 4, 5
DOMAINS = {DRIVER: DRIVER_API, RUNTIME: RUNTIME_API}
ENABLE_ONE = {DRIVER: "cuptiActivityEnableDriverApi", RUNTIME: "cuptiActivityEnableRuntimeApi"}
# What a spinning wait calls some thousand times a step. None of it blocks.
POLLS = frozenset(
    {
        "cuEventQuery",
        "cudaEventQuery",
        "cuThreadExchangeStreamCaptureMode",
        "cudaThreadExchangeStreamCaptureMode",
        "cudaGetLastError",
    }
)
MAX_LIMIT_REACHED = 12  # no record after this one
FORCED = 1
BUFFER_BYTES = 16 << 20
DIRECTIONS = ("?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
MEMORY = (
    "Unknown",
    "Pageable",
    "Pinned",
    "Device",
    "Array",
    "Managed",
    "Device Static",
    "Managed Static",
)

_Request = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Complete = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class ApiRecord(ctypes.Structure):
    """CUpti_ActivityAPI."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("cbid", ctypes.c_uint32),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("process", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("correlation", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    ]


class CopyRecord(ctypes.Structure):
    """The head of CUpti_ActivityMemcpy of every version."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("direction", ctypes.c_uint8),
        ("source", ctypes.c_uint8),
        ("target", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("nbytes", ctypes.c_uint64),
    ]


class Call(NamedTuple):
    """One API call.

    In order of thread and start, an outer call comes before those that it makes.
    """

    thread: int
    start: int
    minus_end: int
    kind: int
    cbid: int


class ActivityRecords:
    """Records inside a `with` block; `synchronize` waits for the device, so that what was begun
    inside is recorded.

    Raises CuptiError on entry where CUPTI is missing or refuses, and at the end where records were
    lost.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self._cupti: Any = None
        self._filled: list[tuple[int, int]] = []  # address, bytes with records
        self._calls: list[Call] = []
        self._begin = self._end = 0
        self.copies: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()

    def __enter__(self) -> ActivityRecords:
        self._cupti = load_cupti()
        _BUFFERS.take(self._cupti, self._filled)
        for kind in (MEMCPY, *DOMAINS):
            self._must("cuptiActivityEnable", kind)
        self._leave_polls_out()
        self._begin = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end = self._now()
        if error is None:
            self._synchronize()
        self._must("cuptiActivityFlushAll", FORCED)
        for each in (MEMCPY, *DOMAINS):
            self._must("cuptiActivityDisable", each)
        self._must("cuptiActivityFlushAll", FORCED)
        lost = ctypes.c_size_t()
        self._must("cuptiActivityGetNumDroppedRecords", None, 0, ctypes.byref(lost))
        for address, size in self._filled:
            self._read(address, size)
        _BUFFERS.free()
        if lost.value and error is None:
            raise CuptiError(f"CUPTI dropped {lost.value} records")

    def counts(self, steps: int) -> Counts:
        """What was recorded, as a window of `steps` steps."""
        made = Counts("activity records", steps, copies=self.copies, copied_bytes=self.copied_bytes)
        inside = [
            call
            for call in self._calls
            if self._begin <= call.start and -call.minus_end <= self._end
        ]
        for (kind, cbid), times in Counter(
            (call.kind, call.cbid) for call in outermost(inside)
        ).items():
            made.calls[self._name(kind, cbid) or f"call {cbid}"] += times
        return made

    def _read(self, address: int, size: int) -> None:
        for record in self._records(address, size):
            kind = ctypes.c_uint32.from_address(record).value
            if kind in DOMAINS:
                call = ApiRecord.from_address(record)
                self._calls.append(Call(call.thread, call.start, -call.end, kind, call.cbid))
            elif kind == MEMCPY:
                copy = CopyRecord.from_address(record)
                name = (
                    f"{_named(DIRECTIONS, copy.direction)} {_named(MEMORY, copy.source)} -> "
                    f"{_named(MEMORY, copy.target)}"
                )
                self.copies[name] += 1
                self.copied_bytes[name] += copy.nbytes

    def _records(self, address: int, size: int) -> Iterator[int]:
        """Addresses of a buffer's records."""
        record, step = ctypes.c_void_p(), self._cupti.cuptiActivityGetNextRecord
        buffer, length, place = (
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            ctypes.byref(record),
        )
        while (result := step(buffer, length, place)) == 0:
            assert record.value is not None
            yield record.value
        if result != MAX_LIMIT_REACHED:
            self._check(result, "cuptiActivityGetNextRecord")

    def _leave_polls_out(self) -> None:
        """After all calls are enabled, which enables these; where CUPTI cannot do it they are
        recorded, and counting takes longer.
        """
        for kind, call in ENABLE_ONE.items():
            for cbid in takewhile(partial(self._name, kind), count(1)):
                if self._name(kind, cbid) in POLLS:
                    getattr(self._cupti, call)(cbid, 0)

    def _name(self, kind: int, cbid: int) -> str:
        """A call's name; empty where there is no such call."""
        name = ctypes.c_char_p()
        result = self._cupti.cuptiGetCallbackName(DOMAINS[kind], cbid, ctypes.byref(name))
        return plain_name((name.value or b"").decode()) if result == 0 else ""

    def _now(self) -> int:
        time = ctypes.c_uint64()
        self._must("cuptiGetTimestamp", ctypes.byref(time))
        return time.value

    def _must(self, call: str, *arguments: object) -> None:
        self._check(getattr(self._cupti, call)(*arguments), call)

    def _check(self, result: int, call: str) -> None:
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._cupti.cuptiGetResultString(result, ctypes.byref(text))
        raise CuptiError(f"{call}: {(text.value or b'?').decode()} ({result})")


class _Buffers:
    """The memory that CUPTI writes to.

    It may ask for some at any time, so that this lives as long as the process.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._filled: list[tuple[int, int]] = []
        self._callbacks = _Request(self._request), _Complete(self._complete)

    def take(self, cupti: Any, filled: list[tuple[int, int]]) -> None:
        """From now on buffers with records are listed in `filled`."""
        self._filled = filled
        result = cupti.cuptiActivityRegisterCallbacks(*self._callbacks)
        if result != 0:
            raise CuptiError(f"cuptiActivityRegisterCallbacks: {result}")

    def free(self) -> None:
        """Drops the buffers that have come back; one that CUPTI still has stays."""
        back = {address for address, _ in self._filled}
        self._held = [buffer for buffer in self._held if ctypes.addressof(buffer) not in back]
        self._filled.clear()

    def _request(self, buffer: Any, size: Any, records: Any) -> None:
        made = (ctypes.c_uint64 * (BUFFER_BYTES // 8))()  # aligned to 8, as records must be
        self._held.append(made)
        buffer[0], size[0], records[0] = ctypes.addressof(made), BUFFER_BYTES, 0

    def _complete(
        self, _context: object, _stream: int, buffer: int, _size: int, valid: int
    ) -> None:
        self._filled.append((buffer, valid))


_BUFFERS = _Buffers()


def outermost(calls: Iterable[Call]) -> Iterator[Call]:
    """Calls that no other call of the same thread has made."""
    thread, end = -1, 0
    for call in sorted(calls):
        if call.thread != thread or call.start >= end:
            thread, end = call.thread, -call.minus_end
            yield call


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"?{number}"
