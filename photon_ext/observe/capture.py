"""`timeline()`: records what host and device do inside a `with` block."""

from __future__ import annotations

import threading
import time
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch

from photon_ext.errors import ConfigError, shown
from photon_ext.observe import host_work
from photon_ext.observe.analysis.report import Options, Report, make_report
from photon_ext.observe.anchor import Bracket, Converter, Offset, drop_anchors, find_offset
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.kineto import KinetoRecords, Recorder, shifted
from photon_ext.observe.records import ClockError, DeviceKind, DeviceSpan, Records
from photon_ext.observe.tape import Tape
from photon_ext.runtime import probe
from photon_ext.runtime.streams import stream_names

CAPACITY = 1_000_000
MAX_CAPACITY = 100_000_000  # the host backend's records have their memory from the start
_starting = threading.Lock()


class Timeline:
    """A recording; see `timeline`. `records`, `report` and `save` are there after the `with` block,
    which waits for the device at its end.

    Attributes:
        bytes_per_step: see `timeline`; it may be set until the report is first asked for.
        bytes_note: what that counts, for the summary; it may be set with it.
    """

    _records: Records | None = None

    def __init__(
        self, options: Options, *, ops: bool, stacks: bool, nvtx: bool, capacity: int
    ) -> None:
        self.bytes_per_step = options.bytes_per_step
        self.bytes_note = options.bytes_note
        self._options = options
        self._tape = Tape(nvtx, capacity)
        self._recorder = Recorder(ops, stacks)
        self._capacity = capacity
        self._brackets: list[list[Bracket]] = []
        self._wall: list[Offset] = []
        self._start = 0
        self._allocated: int | None = None

    def __enter__(self) -> Timeline:
        with _starting:
            if self._start:
                raise ConfigError(
                    "this timeline has recorded already; make a new one with timeline()"
                )
            if probe.active is not None:
                raise ConfigError(
                    "a timeline is being recorded already, and there is one at a time; end it first"
                )
            # of this thread, or of any
            if torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
                raise ConfigError(
                    "torch.profiler is running, and a timeline needs it for itself; end the "
                    "profile first"
                )
            host_work.start(self._capacity)
            try:
                self._recorder.start()
                self._mark_clocks()
            except BaseException:
                host_work.stop()
                raise
            self._allocated = _allocator_requests()
            self._start = time.perf_counter_ns()
            probe.active = self._tape
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.perf_counter_ns()
        if probe.active is not self._tape:
            raise ConfigError("this timeline is not recording; put `with` before it")
        probe.active = None
        allocated = _allocator_requests()
        # what is still running belongs to the recording; these calls themselves come after its end
        host_work.drain()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._mark_clocks()
        host, dropped = host_work.stop()
        found = self._recorder.stop(self._tape.idents)
        self._records = self._assemble(end, host, dropped, found, allocated)

    @property
    def records(self) -> Records:
        """Everything that was recorded. Raises ConfigError before the end of the `with` block."""
        if self._records is None:
            raise ConfigError("this timeline has recorded nothing yet; ask after the `with` block")
        return self._records

    @cached_property
    def report(self) -> Report:
        """What the recording says: computed when first asked for.

        Raises:
            ConfigError: the `with` block has not ended, or `bytes_per_step` was set to what is no
                positive integer.
        """
        _check_bytes(self.bytes_per_step)
        return make_report(
            self.records,
            self._options._replace(bytes_per_step=self.bytes_per_step, bytes_note=self.bytes_note),
        )

    def save(self, directory: str | Path) -> list[Path]:
        """Writes trace.json (opens in ui.perfetto.dev), timeline.html, summary.txt and
        summary.json, and, where matplotlib is installed, timeline.png. Makes the directory,
        overwrites what is there. Returns what was written. Raises ConfigError as `report` does, and
        OSError where a file cannot be written.
        """
        from photon_ext.observe.render.save import save

        return save(self.records, self.report, Path(directory))

    def _mark_clocks(self) -> None:
        self._brackets.append(drop_anchors())
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        self._wall.append(Offset(wall - (before + after) // 2, (after - before + 1) // 2, before))

    def _assemble(
        self,
        end: int,
        host: list[DeviceSpan],
        dropped: int,
        found: KinetoRecords,
        allocated: int | None,
    ) -> Records:
        converter = self._converter(found)
        moved = shifted(found, converter)
        calls = [call for call in moved.calls if self._start <= call.start < end]
        if host and not any(span.kind is DeviceKind.KERNEL for span in (*host, *moved.device)):
            host = [*host, *host_work.eager_spans(self._tape.spans, moved.ops)]
        device = sorted((*host, *moved.device), key=lambda span: span.start)
        streams = {
            stream: name
            for stream, name in stream_names.items()
            if any(span.stream == stream for span in host)
        }
        streams |= {span.stream: f"stream {span.stream}" for span in moved.device}
        return Records(
            backend="cuda" if moved.device else "host" if host else None,
            start=self._start,
            end=end,
            host=sorted(self._tape.spans, key=lambda span: (span.start, span.depth)),
            device=device,
            calls=calls,
            ops=[op for op in moved.ops if self._start <= op.start < end],
            launches=self._tape.launches,
            commits=self._tape.commits,
            threads={
                thread.native_id: thread.name
                for thread in threading.enumerate()
                if thread.native_id
            }
            | self._tape.threads,
            streams=streams,
            allocator=None
            if allocated is None or self._allocated is None
            else allocated - self._allocated,
            dropped=dropped + self._tape.dropped,
            clock=ClockError(converter.error, converter.drift, _device_lead(moved))
            if found.anchors or moved.device
            else ClockError(),
        )

    def _converter(self, found: KinetoRecords) -> Converter:
        """By the anchors; without them (no torch ops recorded) by the wall clock, which the
        profiler's times are said to follow.
        """
        first_brackets, last_brackets = self._brackets[0], self._brackets[-1]
        first = find_offset(first_brackets, found.anchors[: len(first_brackets)])
        last = find_offset(last_brackets, found.anchors[len(first_brackets) :])
        return (
            Converter(first, last)
            if first is not None and last is not None
            else Converter(self._wall[0], self._wall[-1])
        )


def timeline(
    *,
    ops: bool = True,
    stacks: bool = False,
    nvtx: bool = False,
    marker: str | None = None,
    marker_ends: bool = False,
    bytes_per_step: int | None = None,
    capacity: int = CAPACITY,
) -> Timeline:
    """Records the phases of our engines and pipelines, CUDA API calls, kernels and copies, and
    torch ops, of all threads.

    Use it around any code: ``with photon_ext.observe.timeline() as t: ...``, then
    ``t.report.text()`` and ``t.save(directory)``. One at a time. Recording slows the code down,
    most of all where graphs have many kernels: look here for causes, and take times elsewhere.
    Steps are told apart within one engine or pipeline: let only one run at a time.

    Args:
        ops: record torch ops and record_function ranges, which name who caused a synchronization.
        stacks: record Python functions too, which says where in the code; slow.
        nvtx: mark the phases as NVTX ranges, for Nsight; needs a torch with CUDA.
        marker: part of the name of a kernel that runs once per step, in loops that are not ours; by
            default steps begin with our head kernel, with a graph launch, or are found by their
            period.
        marker_ends: the marker is the last kernel of its step (an argmax, say), not the first.
        bytes_per_step: what a step reads and writes at least, in bytes, for its effective
            bandwidth.
        capacity: phases of ours to keep, and records of host streams, whose memory (40 bytes each)
            is reserved at once; later ones are counted and dropped. What torch.profiler records, of
            CUDA and of torch ops, it does not limit.

    Raises:
        ConfigError: an argument is wrong; at the begin of the block, another timeline is being
            recorded, torch.profiler is running, or this one has recorded before; at its end, a
            torch.profiler that began inside has ended the recording.
    """
    if nvtx and not torch.cuda.is_available():
        raise ConfigError(
            "nvtx=True needs a torch with CUDA and a GPU that it sees; leave it out here"
        )
    if marker is not None and (not isinstance(marker, str) or not marker):
        raise ConfigError(f"marker is {shown(marker)}; give a part of a kernel's name, or None")
    if (
        not isinstance(capacity, int)
        or isinstance(capacity, bool)
        or not 1 <= capacity <= MAX_CAPACITY
    ):
        raise ConfigError(
            f"capacity is {shown(capacity)}; give an integer from 1 to {MAX_CAPACITY}, or leave it "
            "out"
        )
    _check_bytes(bytes_per_step)
    return Timeline(
        Options(marker, marker_ends, bytes_per_step),
        ops=ops,
        stacks=stacks,
        nvtx=nvtx,
        capacity=capacity,
    )


def _check_bytes(bytes_per_step: object) -> None:
    if bytes_per_step is None:
        return
    if (
        not isinstance(bytes_per_step, int)
        or isinstance(bytes_per_step, bool)
        or not 1 <= bytes_per_step < 1 << 63
    ):
        raise ConfigError(
            f"bytes_per_step is {shown(bytes_per_step)}; give a positive number of bytes, an "
            "integer, or None"
        )


def _allocator_requests() -> int | None:
    return (
        int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
        if torch.cuda.is_initialized()
        else None
    )


def _device_lead(records: KinetoRecords) -> int:
    """The most by which a kernel seems to start before the call that launched it, nanoseconds; 0
    if none does.
    """
    launches = (CallKind.GRAPH_LAUNCH, CallKind.KERNEL_LAUNCH)
    called = {
        call.correlation: call.start for call in records.calls if classify(call.name) in launches
    }
    kernels = (
        span
        for span in records.device
        if span.kind is DeviceKind.KERNEL and span.correlation in called
    )
    return max(0, max((called[kernel.correlation] - kernel.start for kernel in kernels), default=0))
