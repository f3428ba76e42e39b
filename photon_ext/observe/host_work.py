"""The host backend's own records: what its worker threads ran, as device spans."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from photon_ext import _C
from photon_ext.observe.analysis.intervals import Cover, by_thread, flatten
from photon_ext.observe.records import DeviceKind, DeviceSpan, HostSpan, Op, OpKind
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.streams import stream_names

DESCHEDULED_NS = 50_000  # off the CPU for longer than this, a kernel's thread was descheduled
_COPIES = {"in-copy": "HtoD host memory", "out-copy": "DtoH host memory"}
_NAMES = {"kernel": "function", "graph": "graph", "wait": "wait for an event"}

WorkTuple = tuple[str, str | None, int, int, int, int, int]
"""A record of `_C.stop_host_trace`: work, name, stream, begin and end, bytes, processor time."""


def stop() -> tuple[list[DeviceSpan], int]:
    """The spans, by start, and how many found no room."""
    found, dropped = _C.stop_host_trace()
    return list(spans(found, stream_names, _cpu_clock_is_fine())), dropped


def spans(
    found: Iterable[WorkTuple], names: Mapping[int, str], cpu_clock: bool = True
) -> Iterator[DeviceSpan]:
    """Device spans of work records. Kernels of a replay get its number as their correlation.

    A kernel whose thread was off the CPU ends that much earlier, and the rest of its time is a
    span of its own, DESCHEDULED: when exactly the thread lost the CPU is not known. Without a fine
    clock of processor time (`cpu_clock`) no kernel is cut.
    """
    replays: dict[int, tuple[int, int]] = {}  # by stream: number and end of the latest replay
    for work, name, stream, begin, end, size, cpu in sorted(found, key=lambda w: (w[3], -w[4])):
        kind = DeviceKind(work)
        if kind is DeviceKind.GRAPH:
            count = max((number for number, _ in replays.values()), default=0)
            replays[stream] = (count + 1, end)
        number, until = replays.get(stream, (0, 0))
        number = number if end <= until else 0
        if kind is DeviceKind.COPY:
            title = _COPIES.get(names.get(stream, ""), "copy")
            yield DeviceSpan(title, kind, begin, end, stream, number, size)
            continue
        off = max(0, end - begin - cpu) if cpu_clock and kind is DeviceKind.KERNEL else 0
        off = off if off >= DESCHEDULED_NS else 0
        yield DeviceSpan(name or _NAMES[work], kind, begin, end - off, stream, number)
        if off:
            lost = DeviceKind.DESCHEDULED
            yield DeviceSpan(lost.value, lost, end - off, end, stream, number)


def eager_spans(host: Sequence[HostSpan], ops: Sequence[Op]) -> list[DeviceSpan]:
    """Kernels of steps that ran at the call: the outermost torch ops of the host's launches.

    There the host is the device.
    """
    made = []
    mine = by_thread([op for op in ops if op.kind is OpKind.TORCH])
    for thread, spans_of_thread in by_thread(host).items():
        cover = Cover(spans_of_thread)
        for op in {piece.path[0] for piece in flatten(mine.get(thread, []))}:
            path = cover.at(op.start)
            if path and path[-1].phase in (Phase.LAUNCH, Phase.FINALIZE):
                name = op.name.split("::")[-1]
                made.append(DeviceSpan(name, DeviceKind.KERNEL, op.start, op.end, 0))
    return made


def _cpu_clock_is_fine() -> bool:
    """Whether processor time advances within 100 µs of work; in some sandboxes it ticks."""
    begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
    while time.perf_counter_ns() - begin < 100_000:
        pass
    return time.thread_time_ns() > cpu
