"""Where the host's time goes: phases of ours, calls that block it or allocate; and whether the
copies of results came in time."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import Cause, HostView
from photon_ext.observe.analysis.intervals import by_thread, flatten
from photon_ext.observe.analysis.steps import Steps
from photon_ext.observe.records import Records
from photon_ext.runtime.probe import Phase

LATE_NS = 20_000  # an out-copy may start this much after its step without being late
SHORT_NS = 50_000  # behind a step that is shorter, it may be late because its stream woke up late
COSTLY = (Cause.PAGEABLE, Cause.SYNC, Cause.ALLOCATION)


class CallCost(NamedTuple):
    """Calls of one function, from one place, that block the host or allocate: how many, and the
    median microseconds of one."""

    cause: Cause
    name: str
    where: str
    calls: int
    us: float


class LateCopies(NamedTuple):
    """Copies of results that ran behind the next step: how many, and the median microseconds from
    their own step's end."""

    copies: int
    us: float


def phase_costs(records: Records) -> dict[str, float]:
    """Microseconds per launched step, by innermost phase, largest first."""
    own: dict[str, float] = defaultdict(float)
    for spans in by_thread(records.host).values():
        for piece in flatten(spans):
            own[piece.path[-1].phase.value] += (piece.end - piece.start) / 1e3
    steps = max(len(records.launches), 1)
    return {phase: us / steps for phase, us in sorted(own.items(), key=lambda item: -item[1])}


def costly_calls(records: Records) -> list[CallCost]:
    """Calls that block the host on the device, but for the commit's own wait (I7), pageable copies
    and allocations, by function and place; what costs most first."""
    view = HostView(records)
    found: dict[tuple[Cause, str, str], list[int]] = defaultdict(list)
    for call in records.calls:
        cause = view.cause(call)
        if cause in COSTLY:
            found[cause, call.name, view.where(call)].append(call.end - call.start)
    costs = [CallCost(*what, len(ns), median(ns) / 1e3) for what, ns in found.items()]
    return sorted(costs, key=lambda cost: -cost.calls * cost.us)


def late_copies(records: Records, steps: Steps) -> LateCopies | None:
    """Copies of a step's results that start only when the next step is done, although the results
    were there before it began; None unless that is so of every second one.

    A copy is known by the host's wait for it: waits end in the order of steps (I2), each soon after
    its copy.
    """
    by_index = {step.launch.step: step for step in steps.steps if step.launch is not None}
    copies = sorted((s for s in records.device if s.is_out_copy), key=lambda span: span.end)
    waits = (span for span in records.host if span.phase is Phase.WAIT and span.step is not None)
    delays, place = [], 0
    for wait in sorted(waits, key=lambda span: span.end):
        first = place
        while place < len(copies) and copies[place].end <= wait.end:
            place += 1
        step, after = by_index.get(wait.step or 0), by_index.get((wait.step or 0) + 1)
        if place > first and step is not None and after is not None:
            start = copies[place - 1].start
            behind = start >= after.end and after.end - after.start >= SHORT_NS
            delays.append(start - step.end if behind else 0)
    late = [delay for delay in delays if delay > LATE_NS]
    if not late or 2 * len(late) < len(delays):
        return None
    return LateCopies(len(late), median(late) / 1e3)
