"""What a timeline records: small values, nanoseconds on the clock of time.perf_counter_ns.

The analysis needs nothing else.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from photon_ext.runtime.probe import Phase


class HostSpan(NamedTuple):
    """A phase of our pipeline or engine on one thread; `depth` 0 is outermost."""

    phase: Phase
    start: int
    end: int
    thread: int
    step: int | None = None  # the pipeline's own number, where the phase belongs to a step
    depth: int = 0


class DeviceKind(Enum):
    """What a device span is. Only the host backend has the last three."""

    KERNEL = "kernel"
    COPY = "copy"
    FILL = "fill"
    GRAPH = "graph"  # a replay, around its kernels
    WAIT = "wait"
    DESCHEDULED = "descheduled"  # the system had taken the stream's thread off the CPU


class DeviceSpan(NamedTuple):
    """Work on a stream.

    Attributes:
        name: of a copy, its direction and memory: "HtoD Pinned -> Device".
        correlation: that of the API call that launched it; on the host backend the number of the
            replay, or 0.
        bytes: of a copy, where it is known; else 0.
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
    """One step that our pipeline enqueued; `words` int32 words of input were sent for it."""

    step: int
    slot: int
    kind: str
    tokens: int
    rows: int
    split: bool
    words: int
    start: int
    end: int
    thread: int


class Commit(NamedTuple):
    """One step that our pipeline has read at `time`; `zombies` of its rows were zombies."""

    step: int
    rows: int
    zombies: int
    time: int


class ClockError(NamedTuple):
    """How well the clocks agree, nanoseconds.

    Attributes:
        host_ns: the profiler's clock stands within this much of where it is taken to be.
        drift_ns: how far it moved against ours during the recording, which is corrected for.
        device_ns: the longest time that a kernel seems to start before its launching call: a
            lower bound of the device clock's error.
    """

    host_ns: int = 0
    drift_ns: int = 0
    device_ns: int = 0


class Records(NamedTuple):
    """Everything that was recorded, each list in order of start.

    Attributes:
        backend: "cuda", "host" (streams of the host and inline backends), or None without records
            of a device.
        start, end: the recorded window.
        threads: name by native thread id.
        streams: name by stream number.
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
    dropped: int = 0
    clock: ClockError = ClockError()
