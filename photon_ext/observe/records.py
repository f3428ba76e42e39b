"""What a timeline records: small values, nanoseconds on one clock (that of time.perf_counter_ns).

The analysis needs nothing else.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from photon_ext.runtime.probe import Phase


class HostSpan(NamedTuple):
    """A phase of our pipeline or engine on one thread.

    `depth` 0 is outermost; `step` where the phase belongs to one.
    """

    phase: Phase
    start: int
    end: int
    thread: int
    step: int | None = None
    depth: int = 0


class DeviceKind(Enum):
    """What a device span is.

    On the host backend a replayed graph is a span of its own around its kernels.
    """

    KERNEL = "kernel"
    GRAPH = "graph"
    COPY = "copy"
    FILL = "fill"
    WAIT = "wait"


class DeviceSpan(NamedTuple):
    """Work on a stream. `correlation` is that of the API call that launched it (host backend: the
    number of the replay, or 0).

    A copy's name says its direction and memory: "HtoD Pinned -> Device". `bytes` is 0 where it is
    not known.
    """

    name: str
    kind: DeviceKind
    start: int
    end: int
    stream: int
    correlation: int = 0
    bytes: int = 0

    @property
    def is_pageable(self) -> bool:
        return self.kind is DeviceKind.COPY and "Pageable" in self.name

    @property
    def is_out_copy(self) -> bool:
        return self.kind is DeviceKind.COPY and self.name.startswith("DtoH")

    @property
    def is_in_copy(self) -> bool:
        return self.kind is DeviceKind.COPY and self.name.startswith("HtoD")


class ApiCall(NamedTuple):
    """One CUDA runtime or driver call, the outermost of those that call each other."""

    name: str
    start: int
    end: int
    thread: int
    correlation: int = 0


class OpKind(Enum):
    """Where a span on the host comes from that is not ours."""

    TORCH = "torch op"
    ANNOTATION = "annotation"
    PYTHON = "python"


class Op(NamedTuple):
    """A torch op, a user's record_function range, or (with stacks) a Python function."""

    name: str
    kind: OpKind
    start: int
    end: int
    thread: int


class Launch(NamedTuple):
    """One step that our pipeline enqueued, between `start` and `end`.

    `words` int32 words of input go to the device for it.
    """

    step: int
    slot: int
    kind: str
    lines: int
    rows: int
    split: bool
    words: int
    start: int
    end: int
    thread: int


class Commit(NamedTuple):
    """One step that our pipeline has read at `time`; `zombies` of its rows belong to sequences
    that had ended before.
    """

    step: int
    rows: int
    zombies: int
    time: int


class ClockError(NamedTuple):
    """How well the clocks agree, nanoseconds.

    Attributes:
        host_ns: half the width of the interval in which the profiler's clock can lie against ours;
            0 where there is one clock only.
        drift_ns: how far the two moved against each other between the begin and the end; corrected
            for, linearly.
        device_ns: the most by which a kernel seems to start before the call that launched it: a
            lower bound of the device clock's error.
    """

    host_ns: int = 0
    drift_ns: int = 0
    device_ns: int = 0


class Records(NamedTuple):
    """Everything that was recorded, each list in order of start.

    Attributes:
        backend: "cuda", "host" (the streams of the host and inline backends), or None without
            device records.
        start, end: the recorded window.
        threads: name by native thread id.
        streams: name by stream number.
        allocator: requests to torch's CUDA allocator in the window; None where there is none.
        dropped: records for which there was no room.
    """

    backend: str | None
    start: int
    end: int
    host: list[HostSpan] = []  # noqa: RUF012 - never changed
    device: list[DeviceSpan] = []  # noqa: RUF012
    calls: list[ApiCall] = []  # noqa: RUF012
    ops: list[Op] = []  # noqa: RUF012
    launches: list[Launch] = []  # noqa: RUF012
    commits: list[Commit] = []  # noqa: RUF012
    threads: dict[int, str] = {}  # noqa: RUF012
    streams: dict[int, str] = {}  # noqa: RUF012
    allocator: int | None = None
    dropped: int = 0
    clock: ClockError = ClockError()
