"""Steps from activity records: calls and copies counted, and idle figures, through
photon_ext.observe.

Kernel records inside a graph slow its replay down, so nothing here is used for step times; idle
figures are marked as traced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.common.session import summary
from benchmarks.cuda_calls.counts import Counts
from photon_ext.observe.analysis.kernels import kernel_shares
from photon_ext.observe.analysis.steps import find_steps
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.kineto import Recorder
from photon_ext.observe.records import ApiCall, DeviceKind, DeviceSpan, Records

SHARES = 12


def record(body: Callable[[], object]) -> Records:
    """Runs `body` under the profiler, without torch ops; keeps the calls between its first graph
    launch and its last event wait."""
    # and no more of a timeline: phases would lengthen the gaps that are looked at
    recorder = Recorder(ops=False, stacks=False)
    recorder.start()
    body()
    found = recorder.stop({})
    spans: list[DeviceSpan | ApiCall] = [*found.device, *found.calls]
    begin = min((span.start for span in spans), default=0)
    end = max((span.end for span in spans), default=0)
    return window(Records("cuda", begin, end, device=found.device, calls=found.calls))


def window(records: Records) -> Records:
    """Without the profiler's own calls, which come before the first graph launch and after the last
    event wait."""
    calls = [(call, classify(call.name)) for call in records.calls]
    launches = [call.start for call, kind in calls if kind is CallKind.GRAPH_LAUNCH]
    waits = [call.end for call, kind in calls if kind is CallKind.EVENT_WAIT]
    if not launches or not waits:
        return records
    begin, end = min(launches), max(waits)
    inside = [call for call, _ in calls if begin <= call.start and call.end <= end]
    return records._replace(calls=inside)


def counts(records: Records, steps: int) -> Counts:
    """The calls and copies of a window of `steps` steps."""
    made = Counts("kineto", steps)
    made.calls.update(call.name for call in records.calls)
    for span in records.device:
        if span.kind is DeviceKind.COPY:
            made.copies[span.name] += 1
            made.copied_bytes[span.name] += span.bytes
    return made


def idle(records: Records, marker: str | None = None) -> dict[str, Any]:
    """Step gap and node gap of steady steps from kernel records: microseconds, traced. Empty
    without kernel records of at least two of them. `marker`: the last kernel of a step of a loop
    that is not ours."""
    found = find_steps(records, marker, marker_ends=marker is not None)
    steps = found.steady
    pairs = [(a, b) for a, b in pairwise(steps) if b.number == a.number + 1]
    if not pairs:
        return {}
    return {
        "steps": len(steps),
        "step_gap_us": summary([(after.start - before.end) * 1e-3 for before, after in pairs]),
        "step_us": median((step.end - step.start) * 1e-3 for step in steps),
        "kernel_us": median(step.busy * 1e-3 for step in steps),
        "node_gap_us": median((step.end - step.start - step.busy) * 1e-3 for step in steps),
        "kernels": median(step.kernels for step in steps),
        "share_by_kernel": {kernel.name: kernel.share for kernel in kernel_shares(found)[:SHARES]},
    }
