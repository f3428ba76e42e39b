"""The host backend's own records: what its worker threads ran, as device spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from photon_ext import _C
from photon_ext.observe.analysis.intervals import Cover, by_thread, flatten
from photon_ext.observe.records import DeviceKind, DeviceSpan, HostSpan, Op, OpKind
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.streams import stream_names

_KINDS = {
    "kernel": DeviceKind.KERNEL,
    "graph": DeviceKind.GRAPH,
    "copy": DeviceKind.COPY,
    "wait": DeviceKind.WAIT,
}
_COPIES = {"in-copy": "HtoD host memory", "out-copy": "DtoH host memory"}
_NAMES = {
    DeviceKind.COPY: "copy",
    DeviceKind.GRAPH: "graph",
    DeviceKind.WAIT: "wait for an event",
    DeviceKind.KERNEL: "function",
}

WorkTuple = tuple[str, str | None, int, int, int, int]
"""A record of `_C.stop_host_trace`: work, name, stream, begin and end in nanoseconds, bytes."""


def start(capacity: int) -> None:
    """Starts recording, up to `capacity` records."""
    _C.start_host_trace(capacity)


def drain() -> None:
    """Waits for what host streams have to do."""
    _C.drain_host_streams()


def stop() -> tuple[list[DeviceSpan], int]:
    """The spans, by start, and how many found no room."""
    found, dropped = _C.stop_host_trace()
    return spans(found, stream_names), dropped


def spans(found: Iterable[WorkTuple], names: Mapping[int, str]) -> list[DeviceSpan]:
    """Device spans of work records.

    Kernels of a replayed graph get its number as their correlation.
    """
    made: list[DeviceSpan] = []
    replay: dict[int, DeviceSpan] = {}  # by stream: the graph that began last
    replays = 0
    for work, name, stream, begin, end, size in sorted(
        found, key=lambda record: (record[3], -record[4])
    ):
        kind = _KINDS[work]
        correlation = 0
        if kind is DeviceKind.GRAPH:
            replays += 1
            correlation = replays
        elif (graph := replay.get(stream)) is not None and end <= graph.end:
            correlation = graph.correlation
        title = (
            _COPIES.get(names.get(stream, ""), "copy")
            if kind is DeviceKind.COPY
            else name or _NAMES[kind]
        )
        span = DeviceSpan(
            title, kind, begin, end, stream, correlation, size if kind is DeviceKind.COPY else 0
        )
        if kind is DeviceKind.GRAPH:
            replay[stream] = span
        made.append(span)
    return made


def eager_spans(host: Sequence[HostSpan], ops: Sequence[Op]) -> list[DeviceSpan]:
    """Kernels of steps that ran at the call, on the thread that launched them: the outermost torch
    ops of its launches. There the host is the device.
    """
    made = []
    mine = by_thread([op for op in ops if op.kind is OpKind.TORCH])
    for thread, spans_of_thread in by_thread(host).items():
        cover = Cover[HostSpan](spans_of_thread)
        for op in {piece.path[0] for piece in flatten(mine.get(thread, []))}:
            path = cover.at(op.start)
            if path and path[-1].phase in (Phase.LAUNCH, Phase.FINALIZE):
                made.append(
                    DeviceSpan(op.name.split("::")[-1], DeviceKind.KERNEL, op.start, op.end, 0)
                )
    return made
