"""`timeline()`: records what host and device do inside a `with` block."""

from __future__ import annotations

import threading
import time
from functools import cached_property
from pathlib import Path

import torch

from photon_ext import _C
from photon_ext.checks import check_count
from photon_ext.errors import ConfigError, shown
from photon_ext.observe import host_work
from photon_ext.observe.analysis.report import Options, Report, make_report
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.clock_sync import Bracket, Converter, Offset, find_offset, make_marks
from photon_ext.observe.kineto import KinetoRecords, Recorder
from photon_ext.observe.records import ClockError, DeviceKind, DeviceSpan, Records
from photon_ext.observe.trace_recorder import TraceRecorder
from photon_ext.runtime import probe
from photon_ext.runtime.streams import stream_names

CAPACITY = 1_000_000
MAX_CAPACITY = 100_000_000  # the host backend's records have their memory from the start
MAX_BYTES = (1 << 63) - 1
_starting = threading.Lock()


class Timeline:
    """A recording; see `timeline`.

    `records`, `report` and `save` are there after the `with` block, which waits for the device at
    its end.

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
        self._host = TraceRecorder(nvtx, capacity)
        self._profiler = Recorder(ops, stacks)
        self._capacity = capacity
        self._brackets: list[list[Bracket]] = []
        self._wall: list[Offset] = []
        self._start = 0

    def __enter__(self) -> Timeline:
        with _starting:
            self._check_startable()
            _C.start_host_trace(self._capacity)
            try:
                self._profiler.start()
                self._mark_clocks()
            except BaseException:
                host_work.stop()
                raise
            self._start = time.perf_counter_ns()
            probe.active = self._host
        return self

    def __exit__(self, *raised: object) -> None:
        end = time.perf_counter_ns()
        if probe.active is not self._host:
            raise ConfigError("this timeline is not recording; put `with` before it")
        probe.active = None
        # What still runs belongs to the recording; these calls themselves come after its end.
        _C.drain_host_streams()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._mark_clocks()
        device, dropped = host_work.stop()
        found = self._profiler.stop(self._host.idents)
        self._records = self._assemble(end, device, dropped, found)

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
        if (size := self.bytes_per_step) is not None:
            check_count("bytes_per_step", size, MAX_BYTES)
        options = self._options._replace(bytes_per_step=size, bytes_note=self.bytes_note)
        return make_report(self.records, options)

    def save(self, directory: str | Path) -> list[Path]:
        """Writes trace.json (opens in ui.perfetto.dev), timeline.html, summary.txt and
        summary.json, and, where matplotlib is installed, timeline.png.

        Makes the directory, overwrites what is there, returns what was written. Raises ConfigError
        as `report` does, and OSError where a file cannot be written.
        """
        from photon_ext.observe.render.save import save

        return save(self.records, self.report, Path(directory))

    def _check_startable(self) -> None:
        if self._start:
            raise ConfigError("this timeline has recorded already; make a new one with timeline()")
        if probe.active is not None:
            raise ConfigError(
                "a timeline is being recorded already, and there is one at a time; end it first"
            )
        of_this_thread, of_any = torch.autograd._profiler_enabled, torch.autograd.profiler
        if of_this_thread() or of_any._is_profiler_enabled:
            raise ConfigError(
                "torch.profiler is running, and a timeline needs it for itself; end the profile "
                "first"
            )

    def _mark_clocks(self) -> None:
        self._brackets.append(make_marks())
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        middle, error = (before + after) // 2, (after - before + 1) // 2
        self._wall.append(Offset(wall - middle, error, before))

    def _assemble(
        self, end: int, device: list[DeviceSpan], dropped: int, found: KinetoRecords
    ) -> Records:
        to_ours = self._converter(found)
        moved = found.shifted(to_ours)
        if device and not any(s.kind is DeviceKind.KERNEL for s in (*device, *moved.device)):
            device = [*device, *host_work.eager_spans(self._host.spans, moved.ops)]
        mine = {span.stream for span in device}
        streams = {stream: name for stream, name in stream_names.items() if stream in mine}
        streams |= {span.stream: f"stream {span.stream}" for span in moved.device}
        threads = {t.native_id: t.name for t in threading.enumerate() if t.native_id}
        error = ClockError()
        if found.marks or moved.device:
            error = ClockError(to_ours.error, to_ours.drift, _device_lead(moved))
        return Records(
            backend="cuda" if moved.device else "host" if device else None,
            start=self._start,
            end=end,
            host=sorted(self._host.spans, key=lambda span: (span.start, span.depth)),
            device=sorted((*device, *moved.device), key=lambda span: span.start),
            calls=[call for call in moved.calls if self._start <= call.start < end],
            ops=[op for op in moved.ops if self._start <= op.start < end],
            launches=self._host.launches,
            commits=self._host.commits,
            threads=threads | self._host.threads,
            streams=streams,
            dropped=dropped + self._host.dropped,
            clock=error,
        )

    def _converter(self, found: KinetoRecords) -> Converter:
        """By the sync marks; without them (no torch ops recorded) by the wall clock, which the
        profiler's times are said to follow."""
        begin, finish = self._brackets
        first = find_offset(begin, found.marks[: len(begin)])
        last = find_offset(finish, found.marks[len(begin) :])
        if first is None or last is None:
            return Converter(*self._wall)
        return Converter(first, last)


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
        marker: part of the name of a kernel that runs once per step, in loops that are not ours;
            by default steps begin with our head kernel, or are found by their period.
        marker_ends: the marker is the last kernel of its step (an argmax, say), not the first.
        bytes_per_step: what a step reads and writes at least, for its effective bandwidth.
        capacity: phases of ours to keep, and records of host streams, whose memory (48 bytes each)
            is reserved at once; later ones are counted and dropped. What torch.profiler records,
            of CUDA and of torch ops, it does not limit.

    Raises:
        ConfigError: an argument is wrong; at the begin of the block, another timeline is being
            recorded, torch.profiler is running, or this one has recorded before; at its end, a
            torch.profiler that began inside has ended the recording.
    """
    if nvtx and not torch.cuda.is_available():
        raise ConfigError("nvtx=True needs a torch with CUDA and a GPU that it sees; leave it out")
    if marker is not None and (not isinstance(marker, str) or not marker):
        raise ConfigError(f"marker is {shown(marker)}; give a part of a kernel's name, or None")
    check_count("capacity", capacity, MAX_CAPACITY)
    if bytes_per_step is not None:
        check_count("bytes_per_step", bytes_per_step, MAX_BYTES)
    options = Options(marker, marker_ends, bytes_per_step)
    return Timeline(options, ops=ops, stacks=stacks, nvtx=nvtx, capacity=capacity)


def _device_lead(records: KinetoRecords) -> int:
    """The longest time that a kernel seems to start before the call that launched it, in ns."""
    kinds = (CallKind.GRAPH_LAUNCH, CallKind.KERNEL_LAUNCH)
    called = {c.correlation: c.start for c in records.calls if classify(c.name) in kinds}
    kernels = (span for span in records.device if span.kind is DeviceKind.KERNEL)
    return max((0, *(called.get(k.correlation, k.start) - k.start for k in kernels)))
