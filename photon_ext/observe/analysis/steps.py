"""Where steps begin and end on the device, and which of them are steady.

A step begins with a marker kernel: ours, a named one, or one found by the period of the kernel
sequence. The first step, prefills and steps with another number of kernels are kept out of steady
figures and shown beside them (method: the pegainfer post "From Pre-allocation to Graph Replay",
which cuts at its argmax kernel).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from photon_ext.observe.records import DeviceKind, DeviceSpan, Launch, Records

HEAD_KERNEL = "begin_step"
MIN_STEPS = 4  # fewer repetitions are no period
MAX_EARLY = 2  # steps that can be in flight when a recording begins
REGULAR = 0.6  # share of repetitions that must be equally long


class StepMethod(Enum):
    """How steps were found."""

    HEAD = "our head kernel"
    MARKER = "the given marker kernel"
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

    def number(self, index: int | None) -> int | None:
        """The number here of the pipeline's own step `index`, which counts from its beginning;
        None: it is not in here."""
        known = next(((s.number, s.launch.step) for s in self.steps if s.launch), None)
        number = -1 if index is None or known is None else index - known[1] + known[0]
        return number if 0 <= number < len(self.steps) else None


def short_name(kernel: str) -> str:
    """A demangled kernel's name without return type, namespaces, template arguments, parameters.

    "void photon::cuda::(anonymous namespace)::linear_kernel<float, 4>(photon::LinearParams)" is
    "linear_kernel".
    """
    bare = kernel.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return bare.split("::")[-1].split(" ")[-1]


def find_steps(records: Records, marker: str | None = None, marker_ends: bool = False) -> Steps:
    """Cuts the kernels of a window into steps.

    Args:
        marker: part of the name of a kernel that runs once per step; None: see the module.
        marker_ends: the marker is its step's last kernel, not its first.
    """
    kernels = kernels_of(records)
    method, used, bounds = _bounds(kernels, marker, marker_ends)
    cuts = [cut for cut in pairwise([*bounds, len(kernels)]) if cut[1] > cut[0]]
    steps = [_step(kernels, number, *cut) for number, cut in enumerate(cuts)]
    if method is StepMethod.HEAD:
        steps = _with_launches(steps, kernels, records)
    return Steps(method, used, kernels, _with_reasons(steps, records))


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
    kernels: Sequence[DeviceSpan], marker: str | None, marker_ends: bool
) -> tuple[StepMethod, str | None, list[int]]:
    """The index of each step's first kernel."""
    if marker is not None:
        found = _places(kernels, marker)
        if not found:
            return StepMethod.NONE, marker, []
        bounds = [0, *(index + 1 for index in found)] if marker_ends else found
        return StepMethod.MARKER, marker, bounds
    if heads := _places(kernels, HEAD_KERNEL):
        return StepMethod.HEAD, HEAD_KERNEL, heads
    return _periodic_bounds(kernels)


def _places(kernels: Sequence[DeviceSpan], name: str) -> list[int]:
    return [index for index, kernel in enumerate(kernels) if name in kernel.name]


def _periodic_bounds(
    kernels: Sequence[DeviceSpan],
) -> tuple[StepMethod, str | None, list[int]]:
    """Steps of a loop that says nothing: a kernel that comes back at equal distances, rarest
    first; the step begins where, within that period, the device is idle longest."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(kernels):
        places[short_name(kernel.name)].append(index)
    candidates = []
    for name, found in places.items():
        if len(found) >= MIN_STEPS:
            distances = Counter(after - before for before, after in pairwise(found))
            period, times = distances.most_common(1)[0]
            if (regular := times / (len(found) - 1)) >= REGULAR:
                candidates.append((-round(regular, 1), len(found), name, period))
    if not candidates:
        return StepMethod.NONE, None, []
    *_, name, period = min(candidates)
    found, gaps = places[name], _gaps_before(kernels)

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
    end = max(kernel.end for kernel in own)
    return DeviceStep(number, first, last, own[0].start, end, busy_time(own))


def _with_launches(
    steps: list[DeviceStep], kernels: Sequence[DeviceSpan], records: Records
) -> list[DeviceStep]:
    """Gives each step the note of its launch: both are in the same order."""
    early = _in_flight(steps, kernels, records)
    pairs = list(zip(steps[early:], records.launches, strict=False))
    noted = [step._replace(launch=launch) for step, launch in pairs]
    return [*steps[:early], *noted, *steps[early + len(noted) :]]


def _in_flight(steps: Sequence[DeviceStep], kernels: Sequence[DeviceSpan], records: Records) -> int:
    """How many of the steps were launched before the window began.

    The first later one was launched by a call inside the first launch. Where records do not say
    which call launched a kernel, the answer is the least number for which no step runs before its
    launch, as far as the clocks agree.
    """
    called = {call.correlation: call.start for call in records.calls}
    slack = records.clock.host_ns + records.clock.device_ns
    candidates = range(min(MAX_EARLY, len(steps)) + 1)
    for early, step in enumerate(steps[: len(candidates)]):
        call = called.get(kernels[step.first].correlation, -1)
        if records.launches and records.launches[0].start <= call <= records.launches[0].end:
            return early
    for early in candidates:
        pairs = zip(steps[early:], records.launches, strict=False)
        if all(step.start + slack >= launch.start for step, launch in pairs):
            return early
    return 0


def _with_reasons(steps: Sequence[DeviceStep], records: Records) -> list[DeviceStep]:
    """Says of each step why it is not steady."""
    dead = {commit.step for commit in records.commits if 0 < commit.rows == commit.zombies}
    decodes = [s for s in steps if s.launch is None or s.launch.kind == "decode"]
    plain = decodes or list(steps)
    usual = _usual(step.kernels for step in plain)
    usual_tokens = _usual(step.launch.tokens for step in plain if step.launch is not None)

    def reason(step: DeviceStep) -> str | None:
        launch = step.launch
        if launch is not None and launch.kind != "decode":
            return launch.kind
        if step.number == 0:
            return "first"
        if step.number == len(steps) - 1:
            return "last, which the window may cut"
        if launch is not None and launch.tokens != usual_tokens:
            return f"{launch.tokens} tokens, the others {usual_tokens}"
        if launch is not None and launch.step in dead:
            return "zombies only"
        return f"{step.kernels} kernels, the others {usual}" if step.kernels != usual else None

    return [step._replace(excluded=reason(step)) for step in steps]


def _usual(values: Iterable[int]) -> int | None:
    most = Counter(values).most_common(1)
    return most[0][0] if most else None
