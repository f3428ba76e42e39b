"""Where steps begin and end on the device, and which of them are steady.

A step begins with a marker kernel: ours, a named one, the first of a graph launch, or one found by
the period of the kernel sequence. The first step, prefills and steps with another number of kernels
are kept out of steady figures and shown beside them (method: the pegainfer post "From
Pre-allocation to Graph Replay", which cuts at its argmax kernel).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.records import DeviceKind, DeviceSpan, Launch, Records
from photon_ext.runtime.probe import Phase

HEAD_KERNEL = "begin_step"
MIN_STEPS = 4  # fewer repetitions are no period
MAX_EARLY = 4  # replays that can be in flight: two steps, each with its late sampling
REGULAR = 0.6  # share of repetitions that must be equally long


class StepMethod(Enum):
    """How steps were found."""

    HEAD = "our head kernel"
    MARKER = "the given marker kernel"
    GRAPH = "graph launches"
    PERIOD = "the period of the kernel sequence"
    NONE = "no steps found"


class DeviceStep(NamedTuple):
    """One step: kernels[first:last] of its Steps.

    Attributes:
        number: in the window, from 0 on; what every file and picture calls it.
        start, end: first kernel's start, latest kernel's end, nanoseconds.
        busy: nanoseconds with at least one kernel running.
        launch: what our pipeline noted of it.
        excluded: why it is no steady step; None: it is one.
    """

    number: int
    first: int
    last: int
    start: int
    end: int
    busy: int
    launch: Launch | None = None
    excluded: str | None = None

    @property
    def kernels(self) -> int:
        return self.last - self.first


class Steps(NamedTuple):
    """All steps of a window, and the kernels that they are made of, by start."""

    method: StepMethod
    marker: str | None
    kernels: list[DeviceSpan]
    steps: list[DeviceStep]

    @property
    def steady(self) -> list[DeviceStep]:
        return [step for step in self.steps if step.excluded is None]

    def of(self, step: DeviceStep) -> list[DeviceSpan]:
        """The kernels of one step."""
        return self.kernels[step.first : step.last]


class Numbers:
    """The numbers that the window's steps have, for what goes by the pipeline's own, which it
    counts from its beginning.
    """

    def __init__(self, steps: Sequence[DeviceStep]) -> None:
        # by the pipeline's number: when it was launched, number here
        self._found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        known = [(step, step.launch) for step in steps if step.launch is not None]
        for step, launch in known:
            self._found[launch.step].append((launch.start, step.number))
        if known:
            first, launch = known[0]
            for early in steps[: first.number]:  # in flight when the window began
                self._found[launch.step - (first.number - early.number)].append(
                    (early.start, early.number)
                )

    def at(self, index: int, end: int) -> int | None:
        """Of the pipeline's step `index`, by what the host did for it until `end` (two pipelines
        may have one each); None: not in here.
        """
        found = self._found.get(index, [])
        return next(
            (number for begin, number in reversed(found) if begin <= end),
            found[0][1] if found else None,
        )


def short_name(kernel: str) -> str:
    """A demangled kernel's name without return type, namespaces, template arguments and parameters.

    "void photon::cuda::(anonymous namespace)::linear_kernel<float, 4>(photon::LinearParams)" is
    "linear_kernel".
    """
    return (
        kernel.replace("(anonymous namespace)::", "")
        .split("<")[0]
        .split("(")[0]
        .split("::")[-1]
        .split(" ")[-1]
    )


def find_steps(records: Records, marker: str | None = None, marker_ends: bool = False) -> Steps:
    """Cuts the kernels of a window into steps.

    Args:
        marker: part of the name of a kernel that runs once per step; None: see the module.
        marker_ends: the marker is its step's last kernel, not its first.
    """
    kernels = kernels_of(records)
    method, used, bounds = _bounds(records, kernels, marker, marker_ends)
    steps = [
        _step(kernels, number, first, last)
        for number, (first, last) in enumerate(pairwise([*bounds, len(kernels)]))
        if last > first
    ]
    steps = match_launches(steps, kernels, records)
    zombies = {
        commit.step for commit in records.commits if commit.rows and commit.zombies == commit.rows
    }
    return Steps(method, used, kernels, _excluded(steps, zombies))


def kernels_of(records: Records) -> list[DeviceSpan]:
    """What kernels ran, fills included, by start."""
    return [span for span in records.device if span.kind in (DeviceKind.KERNEL, DeviceKind.FILL)]


def busy_time(kernels: Sequence[DeviceSpan]) -> int:
    """Nanoseconds with at least one of these kernels running; they are sorted by start."""
    busy, reached = 0, kernels[0].start
    for kernel in kernels:
        busy += max(0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return busy


def _bounds(
    records: Records, kernels: Sequence[DeviceSpan], marker: str | None, marker_ends: bool
) -> tuple[StepMethod, str | None, list[int]]:
    """The index of each step's first kernel."""
    for method, name in ((StepMethod.MARKER, marker), (StepMethod.HEAD, HEAD_KERNEL)):
        if name is None:
            continue
        found = [index for index, kernel in enumerate(kernels) if name in kernel.name]
        if found:
            ends = marker_ends and method is StepMethod.MARKER
            return method, name, [0, *(index + 1 for index in found)] if ends else found
        if method is StepMethod.MARKER:
            return StepMethod.NONE, name, []
    if regular := _graph_bounds(records, kernels):
        return StepMethod.GRAPH, None, regular
    return periodic_bounds(kernels)


def _graph_bounds(records: Records, kernels: Sequence[DeviceSpan]) -> list[int]:
    """First kernels of graph launches, if most of those are of one size (a step of several
    graphs is left to the period).
    """
    graphs = {
        call.correlation for call in records.calls if classify(call.name) is CallKind.GRAPH_LAUNCH
    }
    graphs |= {span.correlation for span in records.device if span.kind is DeviceKind.GRAPH}
    sizes: Counter[int] = Counter(
        kernel.correlation for kernel in kernels if kernel.correlation in graphs
    )
    if len(sizes) < MIN_STEPS or Counter(sizes.values()).most_common(1)[0][1] < REGULAR * len(
        sizes
    ):
        return []
    seen: set[int] = set()
    bounds = []
    for index, kernel in enumerate(kernels):
        if kernel.correlation in sizes and kernel.correlation not in seen:
            seen.add(kernel.correlation)
            bounds.append(index)
    return bounds


def periodic_bounds(kernels: Sequence[DeviceSpan]) -> tuple[StepMethod, str | None, list[int]]:
    """Steps of a loop that says nothing: a kernel that comes back at equal distances, rarest first;
    the step begins where, within that period, the device is idle longest.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(kernels):
        places[short_name(kernel.name)].append(index)
    candidates = []
    for name, found in places.items():
        if len(found) < MIN_STEPS:
            continue
        period, times = Counter(after - before for before, after in pairwise(found)).most_common(1)[
            0
        ]
        regular = times / (len(found) - 1)
        if regular >= REGULAR:
            candidates.append((-round(regular, 1), len(found), name, period))
    if not candidates:
        return StepMethod.NONE, None, []
    *_, name, period = min(candidates)
    found = places[name]
    gaps = _gaps_before(kernels)

    def typical_gap(back: int) -> float:
        return median(gaps[index - back] for index in found if index >= back)

    back = max(range(period), key=lambda back: (typical_gap(back), -back))
    shifted = [index - back for index in found if index >= back]
    return StepMethod.PERIOD, short_name(kernels[shifted[0]].name), shifted


def _gaps_before(kernels: Sequence[DeviceSpan]) -> list[int]:
    """Nanoseconds of idle device before each kernel."""
    gaps, reached = [], kernels[0].start if kernels else 0
    for kernel in kernels:
        gaps.append(max(0, kernel.start - reached))
        reached = max(reached, kernel.end)
    return gaps


def _step(kernels: Sequence[DeviceSpan], number: int, first: int, last: int) -> DeviceStep:
    own = kernels[first:last]
    return DeviceStep(
        number, first, last, own[0].start, max(kernel.end for kernel in own), busy_time(own)
    )


def match_launches(
    steps: Sequence[DeviceStep], kernels: Sequence[DeviceSpan], records: Records
) -> list[DeviceStep]:
    """Gives each step the note of its launch: by the API call that launched its first kernel; on
    the host backend by its replay's number, or, for what ran at the call, by time. GPU records
    without the call they came from are matched by order.
    """
    if not records.launches or not steps:
        return list(steps)
    calls = {call.correlation: call.start for call in records.calls}
    on_gpu = records.backend == "cuda"
    replays = {} if on_gpu else enqueues(records)
    starts = [launch.start for launch in records.launches]

    def launch_at(time: int | None) -> Launch | None:
        place = 0 if time is None else bisect_right(starts, time)
        launch = records.launches[place - 1] if place else None
        return launch if launch is not None and time is not None and time <= launch.end else None

    matched = []
    for step in steps:
        kernel = kernels[step.first]
        if kernel.correlation in replays:
            launch = replays[kernel.correlation].launch
        else:
            launch = launch_at(calls.get(kernel.correlation) if on_gpu else kernel.start)
        matched.append(step._replace(launch=launch))
    if on_gpu and all(step.launch is None for step in matched):
        return _match_by_order(steps, records.launches)
    return matched


def _match_by_order(steps: Sequence[DeviceStep], launches: Sequence[Launch]) -> list[DeviceStep]:
    """As `enqueues`: after the least number of steps for which none runs before its launch."""
    for early in range(min(MAX_EARLY, len(steps)) + 1):
        if all(
            step.start >= launch.start
            for step, launch in zip(steps[early:], launches, strict=False)
        ):
            notes = {early + place: launch for place, launch in enumerate(launches)}
            return [step._replace(launch=notes.get(step.number)) for step in steps]
    return list(steps)


class Enqueue(NamedTuple):
    """When the host was done enqueueing a replay; `launch` is the step's note, None for its late
    sampling.
    """

    start: int
    end: int
    thread: int
    launch: Launch | None


def enqueues(records: Records) -> dict[int, Enqueue]:
    """Host backend: who enqueued each replay, by its number. Both run in order; replays of steps
    that were in flight when the window began come first. Their count is the least for which nothing
    runs before it is enqueued; empty if there is none (some steps ran eagerly).
    """
    made = [Enqueue(launch.start, launch.end, launch.thread, launch) for launch in records.launches]
    if any(launch.split for launch in records.launches):
        made += [
            Enqueue(span.start, span.end, span.thread, None)
            for span in records.host
            if span.phase is Phase.FINALIZE and span.step is not None
        ]
    made.sort(key=lambda enqueue: enqueue.start)
    replays = [span for span in records.device if span.kind is DeviceKind.GRAPH]
    for early in range(min(MAX_EARLY, len(replays)) + 1):
        pairs = list(zip(replays[early:], made, strict=False))
        if pairs and all(replay.start >= enqueue.start for replay, enqueue in pairs):
            return {replay.correlation: enqueue for replay, enqueue in pairs}
    return {}


def _excluded(steps: Sequence[DeviceStep], zombies: Iterable[int]) -> list[DeviceStep]:
    """Says of each step why it is not steady."""
    dead = set(zombies)
    plain = [step for step in steps if step.launch is None or step.launch.kind == "decode"] or list(
        steps
    )
    usual = Counter(step.kernels for step in plain).most_common(1)[0][0] if plain else 0
    lines = Counter(step.launch.lines for step in plain if step.launch is not None)
    usual_lines = lines.most_common(1)[0][0] if lines else None

    def reason(step: DeviceStep) -> str | None:
        if step.launch is not None and step.launch.kind != "decode":
            return step.launch.kind
        if step.number == 0:
            return "first"
        if step.number == len(steps) - 1:
            return "last, which the window may cut"
        if step.launch is not None and step.launch.lines != usual_lines:
            return f"{step.launch.lines} lines, the others {usual_lines}"
        if step.launch is not None and step.launch.step in dead:
            return "zombies only"
        return f"{step.kernels} kernels, the others {usual}" if step.kernels != usual else None

    return [step._replace(excluded=reason(step)) for step in steps]
