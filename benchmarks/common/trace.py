"""Activity records through torch.profiler: API calls, kernels and copies, and what they say about steps.

Kernel records inside a graph slow its replay down, so nothing here is used for step times; idle figures are marked as traced.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common.calls import CallKind, Counts, classify, is_api_call, plain_name
from benchmarks.common.numbers import summary

HEAD_KERNEL = "begin_step"
COPY_PREFIX = "Memcpy "
NO_KERNELS = ("Memcpy", "Memset", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event")


class Call(NamedTuple):
    """One API call, nanoseconds."""

    name: str
    start: int
    end: int
    thread: int


class Kernel(NamedTuple):
    """One kernel on the device, nanoseconds; `correlation` is that of the launch that it came from."""

    name: str
    start: int
    end: int
    correlation: int


@dataclass
class Trace:
    """The records of one profile."""

    calls: list[Call]
    kernels: list[Kernel]
    copies: list[str]  # "HtoD Pinned -> Device"


class StepTime(NamedTuple):
    """One step on the device, nanoseconds: first kernel's start, last kernel's end, and time with at least one kernel running."""

    start: int
    end: int
    busy: int
    kernels: int


def record(body: Callable[[], object]) -> Trace:
    """Runs `body` under the profiler; keeps what happened between its first graph launch and its last event wait."""
    # A profiler that tears CUPTI down and starts it again does not survive captured graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    if results is None:
        raise RuntimeError("torch.profiler returned no records; this torch was built without kineto")
    return window(parse(results.events()))


def parse(events: Iterable[Any]) -> Trace:
    """Sorts kineto events into calls (outermost ones only), kernels and copies."""
    calls, kernels, copies = [], [], []
    for event in events:
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            if name.startswith(COPY_PREFIX):
                copies.append((start, name.removeprefix(COPY_PREFIX).replace("(", "").replace(")", "")))
            elif not name.startswith(NO_KERNELS):
                kernels.append(Kernel(name, start, end, event.correlation_id()))
        elif is_api_call(name):
            calls.append(Call(plain_name(name), start, end, event.device_resource_id()))
    return Trace(outermost(calls), sorted(kernels, key=lambda kernel: kernel.start), [name for _, name in sorted(copies)])


def outermost(calls: Iterable[Call]) -> list[Call]:
    """Calls that are not part of another call of the same thread (a runtime call and the driver call inside it count once)."""
    kept: list[Call] = []
    ends: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: (call.start, -call.end)):
        if call.start >= ends.get(call.thread, 0):
            kept.append(call)
            ends[call.thread] = call.end
    return kept


def window(trace: Trace) -> Trace:
    """Without the profiler's own calls, which come before the first graph launch and after the last event wait."""
    launches = [call.start for call in trace.calls if classify(call.name) is CallKind.GRAPH_LAUNCH]
    waits = [call.end for call in trace.calls if classify(call.name) is CallKind.EVENT_WAIT]
    if not launches or not waits:
        return trace
    begin, end = min(launches), max(waits)
    return Trace([call for call in trace.calls if begin <= call.start and call.end <= end], trace.kernels, trace.copies)


def counts(trace: Trace, steps: int) -> Counts:
    """The trace's calls and copies as a window of `steps` steps; sizes of copies are not known."""
    made = Counts("kineto", steps)
    made.calls.update(call.name for call in trace.calls)
    made.copies.update(trace.copies)
    return made


def step_times(kernels: Sequence[Kernel]) -> list[StepTime]:
    """Kernels by graph replay, in time order; `kernels` sorted by start."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.correlation].append(kernel)
    heads = sum(HEAD_KERNEL in kernel.name for kernel in kernels)
    if heads and len(groups) != heads:  # records without the launch they came from: a step begins with its head kernel
        groups.clear()
        step = 0
        for kernel in kernels:
            step += HEAD_KERNEL in kernel.name
            groups[step].append(kernel)
    return sorted(step_time(group) for group in groups.values())


def step_time(kernels: Sequence[Kernel]) -> StepTime:
    """The step that these kernels are, at least one, sorted by start."""
    busy, reached = 0, 0
    for kernel in kernels:
        busy += max(0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return StepTime(kernels[0].start, reached, busy, len(kernels))


def idle(trace: Trace) -> dict[str, Any]:
    """Step gap and node gap from kernel records: microseconds, traced. Empty without kernel records."""
    steps = step_times(trace.kernels)[1:-1]  # a profile may begin and end inside a step
    if len(steps) < 2:
        return {}
    gaps = [(after.start - before.end) * 1e-3 for before, after in pairwise(steps)]
    by_name: dict[str, float] = defaultdict(float)
    for kernel in trace.kernels:
        by_name[short_name(kernel.name)] += (kernel.end - kernel.start) * 1e-3
    total = sum(by_name.values())
    return {
        "steps": len(steps),
        "step_gap_us": summary(gaps),
        "step_us": median((step.end - step.start) * 1e-3 for step in steps),
        "kernel_us": median(step.busy * 1e-3 for step in steps),
        "node_gap_us": median((step.end - step.start - step.busy) * 1e-3 for step in steps),
        "kernels": median(step.kernels for step in steps),
        "share_by_kernel": {name: us / total for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:12]},
    }


def short_name(kernel: str) -> str:
    """A demangled kernel's name without return type, namespaces, template arguments and parameters.

    "void photon::cuda::(anonymous namespace)::linear_kernel<float, 4>(photon::LinearParams)" is "linear_kernel".
    """
    return kernel.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].split("::")[-1].split(" ")[-1]
