"""A timeline as trace events (Chrome's JSON), which ui.perfetto.dev opens.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete
events ("X") with microseconds, metadata events ("M") that name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from photon_ext.observe.analysis.gaps import GapKind
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.analysis.steps import Numbers
from photon_ext.observe.records import DeviceSpan, Records
from photon_ext.observe.render.lanes import gap_text, host_step, step_text, step_title

HOST, DEVICE, STEPS = 1, 2, 3
_PROCESSES = {HOST: "host", DEVICE: "device streams", STEPS: "steps"}
_IDLE_COLOUR = "terrible"  # one of the viewer's reserved names: red
_GAP_LANE = 9


def trace_events(records: Records, report: Report) -> dict[str, Any]:
    """The document: host threads, device streams, and steps by slot with the idle time between
    them.
    """
    events = [
        *_names(records),
        *_host(records, Numbers(report.steps.steps)),
        *_device(records),
        *_steps(report, records.start),
    ]
    return {
        "displayTimeUnit": "ns",
        "traceEvents": events,
        "otherData": {"made by": "photon_ext", "steps found by": report.method},
    }


def _names(records: Records) -> Iterator[dict[str, Any]]:
    threads = {(HOST, thread): name for thread, name in records.threads.items()}
    threads |= {(DEVICE, stream): name for stream, name in records.streams.items()}
    threads |= {(STEPS, 0): "slot A", (STEPS, 1): "slot B", (STEPS, _GAP_LANE): "idle"}
    for process, name in _PROCESSES.items():
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": process,
            "tid": 0,
            "name": "process_sort_index",
            "args": {"sort_index": process},
        }
    for (process, thread), name in threads.items():
        yield {
            "ph": "M",
            "pid": process,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": name},
        }


def _host(records: Records, numbers: Numbers) -> Iterator[dict[str, Any]]:
    zero = records.start
    for span in records.host:
        step = host_step(numbers, span)
        yield _event(
            HOST,
            span.thread,
            span.phase.value,
            "phase",
            span.start,
            span.end,
            zero,
            {} if step is None else {"step": step},
        )
    for op in records.ops:
        yield _event(HOST, op.thread, op.name, op.kind.value, op.start, op.end, zero, {})
    for call in records.calls:
        yield _event(
            HOST,
            call.thread,
            call.name,
            "cuda api",
            call.start,
            call.end,
            zero,
            {"correlation": call.correlation},
        )


def _device(records: Records) -> Iterator[dict[str, Any]]:
    for span in records.device:
        yield _event(
            DEVICE,
            span.stream,
            span.name,
            span.kind.value,
            span.start,
            span.end,
            records.start,
            _span_args(span),
        )


def _span_args(span: DeviceSpan) -> dict[str, Any]:
    return {"correlation": span.correlation, **({"bytes": span.bytes} if span.bytes else {})}


def _steps(report: Report, zero: int) -> Iterator[dict[str, Any]]:
    for step in report.steps.steps:
        slot = step.launch.slot if step.launch is not None else step.number
        yield _event(
            STEPS,
            slot % 2,
            step_title(step),
            "step",
            step.start,
            step.end,
            zero,
            {"what": step_text(step)},
        )
    for gap in report.gaps:
        if gap.kind in (GapKind.STEP, GapKind.SPLIT):
            args = {"waited for": gap_text(gap), "from": gap.before, "to": gap.after}
            yield {
                **_event(STEPS, _GAP_LANE, gap.kind.value, "idle", gap.start, gap.end, zero, args),
                "cname": _IDLE_COLOUR,
            }


def _event(
    process: int,
    thread: int,
    name: str,
    category: str,
    start: int,
    end: int,
    zero: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": (start - zero) / 1e3,
        "dur": max(0, end - start) / 1e3,
        "args": args,
    }
