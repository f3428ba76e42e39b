"""A timeline as trace events (Chrome's JSON), which ui.perfetto.dev opens.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete
events ("X") with microseconds, metadata events ("M") that name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from photon_ext.observe.analysis.gaps import idle_gaps
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import gap_text, step_text

HOST, DEVICE, STEPS = 1, 2, 3
_PROCESSES = {HOST: "host", DEVICE: "device streams", STEPS: "steps"}
_GAP_LANE = 9


def trace_events(records: Records, report: Report) -> dict[str, Any]:
    """The document: host threads, device streams, and steps by slot with the idle time between."""
    events = [*_names(records), *_host(records, report), *_device(records, report)]
    for event in events:
        if event["ph"] == "X":  # nanoseconds until here
            event["dur"] = max(0, event["dur"] - event["ts"]) / 1e3
            event["ts"] = (event["ts"] - records.start) / 1e3
    about = {"made by": "photon_ext", "steps found by": report.method}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": about}


def _names(records: Records) -> Iterator[dict[str, Any]]:
    for process, name in _PROCESSES.items():
        for kind, args in (("name", {"name": name}), ("sort_index", {"sort_index": process})):
            yield {"ph": "M", "pid": process, "tid": 0, "name": f"process_{kind}", "args": args}
    threads = {(HOST, thread): name for thread, name in records.threads.items()}
    threads |= {(DEVICE, stream): name for stream, name in records.streams.items()}
    threads |= {(STEPS, 0): "slot A", (STEPS, 1): "slot B", (STEPS, _GAP_LANE): "idle"}
    for (process, thread), name in threads.items():
        named = {"ph": "M", "pid": process, "tid": thread, "name": "thread_name"}
        yield {**named, "args": {"name": name}}


def _host(records: Records, report: Report) -> Iterator[dict[str, Any]]:
    for span in records.host:
        step = report.steps.number(span.step)
        args = {} if step is None else {"step": step}
        yield _event((HOST, span.thread), span.phase.value, "phase", span, args)
    for op in records.ops:
        yield _event((HOST, op.thread), op.name, op.kind.value, op, {})
    for call in records.calls:
        args = {"correlation": call.correlation}
        yield _event((HOST, call.thread), call.name, "cuda api", call, args)


def _device(records: Records, report: Report) -> Iterator[dict[str, Any]]:
    for span in records.device:
        args = {"correlation": span.correlation, "bytes": span.bytes}
        yield _event((DEVICE, span.stream), span.name, span.kind.value, span, args)
    for step in report.steps.steps:
        slot = step.launch.slot if step.launch is not None else step.number
        name = f"step {step.number}"
        yield _event((STEPS, slot % 2), name, "step", step, {"what": step_text(step)})
    for gap in idle_gaps(report.gaps):
        told = {"waited for": gap_text(gap), "from": gap.before, "to": gap.after}
        event = _event((STEPS, _GAP_LANE), gap.kind.value, "idle", gap, told)
        yield {**event, "cname": "terrible"}  # one of the viewer's reserved names: red


def _event(
    track: tuple[int, int], name: str, category: str, span: Any, args: dict[str, Any]
) -> dict[str, Any]:
    """An event of `span`, whose "ts" and "dur" are its start and end until they are converted."""
    place = {"ph": "X", "pid": track[0], "tid": track[1], "name": name, "cat": category}
    return {**place, "ts": span.start, "dur": span.end, "args": args}
