"""What is wrong with a loop, found in its records and said in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import NODE_FLOOR, Cause, Gap, GapKind, HostView, share_name
from photon_ext.observe.analysis.steps import Steps
from photon_ext.observe.api import CallKind, classify
from photon_ext.observe.records import ApiCall, DeviceSpan, HostSpan, Records
from photon_ext.runtime.probe import Phase

MIN_US = 10.0  # a cause that costs a step less is not worth a line of its own
SHOWN = 4  # of the smaller causes, which share one
LATE_NS = 20_000  # an out-copy may start this much after its step without being late
# behind a step that is shorter than this, a copy may as well be late because its stream woke up
# late
SHORT_NS = 50_000
BLOCKING = (CallKind.SYNC, CallKind.EVENT_WAIT)


class FindingKind(Enum):
    """What was found."""

    GAP = "the device waits"
    OUT_COPY = "an out-copy runs behind the next forward"
    PAGEABLE = "pageable copies"
    SYNC = "synchronizing calls"
    ALLOCATION = "allocations"
    ZOMBIES = "zombie rows"


class Finding(NamedTuple):
    """One of them: how often, what it costs in microseconds a time, and a sentence that says so.

    `where` names phase, op or kernel.
    """

    kind: FindingKind
    times: int
    us: float
    where: str
    text: str


def find_all(records: Records, steps: Steps, gaps: Sequence[Gap]) -> list[Finding]:
    """All findings, what costs most per step first; zombies last."""
    view = HostView(records)
    found = [
        *waits(steps, gaps),
        *late_out_copies(records, steps),
        *pageable_copies(records, view),
        *synchronizations(records, view),
    ]
    found += allocations(records, view)
    return sorted(found, key=lambda finding: -finding.us * finding.times) + zombies(records, steps)


def waits(steps: Steps, gaps: Sequence[Gap]) -> list[Finding]:
    """Whom the device waited for in the gaps of steady steps, by cause and place. Its own time
    between queued steps is no wait.

    Causes too small for a line each are one line together, where that is not too small: a gap of 25
    us in five pieces is no less idle.
    """
    steady = {step.number for step in steps.steady}
    # nanoseconds by the gap's place in `gaps`
    total: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for place, gap in enumerate(gaps):
        for share in gap.shares:
            if gap.step in steady and gap.kind is not GapKind.REST:
                total[share_name(share)][place] += share.ns
    per_step = {name: sum(ns.values()) / 1e3 / len(steady) for name, ns in total.items()}
    made = []
    for name, ns in total.items():
        if per_step[name] >= MIN_US:
            what = (
                "idles {} between kernels, with the next work queued already"
                if name == Cause.DEVICE.value
                else f"waits {{}} for {name}"
            )
            figure = f"{per_step[name]:.0f} us per step (mean)"
            text = f"the device {what.format(figure)}, {_by_kind(gaps, ns, len(steady))}"
            made.append(
                Finding(
                    FindingKind.GAP, len(ns), per_step[name] * len(steady) / len(ns), name, text
                )
            )
    small = sorted(
        (name for name, us in per_step.items() if us < MIN_US and name != Cause.DEVICE.value),
        key=lambda name: -per_step[name],
    )
    us = sum(per_step[name] for name in small)
    if us >= MIN_US:
        places = {place for name in small for place in total[name]}
        parts = ", ".join(f"{name} {per_step[name]:.1f} us" for name in small[:SHOWN])
        parts += f" and {len(small) - SHOWN} more" * (len(small) > SHOWN)
        ns = {place: sum(total[name].get(place, 0) for name in small) for place in sorted(places)}
        text = (
            f"the device waits {us:.0f} us per step (mean) for small things: {parts}, "
            f"{_by_kind(gaps, ns, len(steady))}"
        )
        made.append(
            Finding(
                FindingKind.GAP,
                len(places),
                us * len(steady) / len(places),
                ", ".join(small[:SHOWN]),
                text,
            )
        )
    return made


def _by_kind(gaps: Sequence[Gap], waited: Mapping[int, int], steps: int) -> str:
    """Where a wait lies, by its nanoseconds at places in `gaps`: "in 8 step gaps (34.1 us) and 5
    node gaps of 2 us or more (5.9 us)".
    """
    kinds: dict[GapKind, list[int]] = {kind: [] for kind in GapKind}
    for place, spent in waited.items():
        kinds[gaps[place].kind].append(spent)
    present = {kind: ns for kind, ns in kinds.items() if ns}
    names = {
        kind: f"{kind.value}s" + f" of {NODE_FLOOR / 1e3:.0f} us or more" * (kind is GapKind.NODE)
        for kind in present
    }
    parts = [
        f"{len(ns)} {names[kind]}" + f" ({sum(ns) / 1e3 / steps:.1f} us)" * (len(present) > 1)
        for kind, ns in present.items()
    ]
    return f"in {' and '.join(parts)} of {steps} steady steps"


def late_out_copies(records: Records, steps: Steps) -> list[Finding]:
    """Copies of a step's results that start only when the next step is done, although the results
    were there before it began; said if that is so of every second one.

    A copy is known by the host's wait for it: waits end in the order of steps (I2), each soon after
    its copy.
    """
    by_index = {step.launch.step: step for step in steps.steps if step.launch is not None}
    copies = [span for span in records.device if span.is_out_copy]
    delays = []
    for wait, copy in _waited_copies(records.host, copies):
        if (
            wait.step is None
            or (step := by_index.get(wait.step)) is None
            or (following := by_index.get(wait.step + 1)) is None
        ):
            continue
        behind = copy.start >= following.end and following.end - following.start >= SHORT_NS
        delays.append(copy.start - step.end if behind else 0)
    late = [delay for delay in delays if delay > LATE_NS]
    if not late or 2 * len(late) < len(delays):
        return []
    us = median(late) / 1e3
    text = (
        f"{len(late)} copies of results to the host ran behind the next step, {us:.0f} us after "
        "their own step (median): the host could "
        "not commit before; enqueue the copy, or record the event it waits for, before the next "
        "step is launched"
    )
    return [Finding(FindingKind.OUT_COPY, len(late), us, "out-copy", text)]


def _waited_copies(
    spans: Iterable[HostSpan], copies: Sequence[DeviceSpan]
) -> Iterable[tuple[HostSpan, DeviceSpan]]:
    """Each wait of the pipeline with the copy that it waited for: the last one that ended before
    the wait did.
    """
    by_end = sorted(copies, key=lambda span: span.end)
    place = 0
    for wait in sorted(
        (span for span in spans if span.phase is Phase.WAIT), key=lambda span: span.end
    ):
        first = place
        while place < len(by_end) and by_end[place].end <= wait.end:
            place += 1
        if place > first:
            yield wait, by_end[place - 1]


def pageable_copies(records: Records, view: HostView) -> list[Finding]:
    """Copies of memory that is not page-locked, by the place that made them."""
    calls = {call.correlation: call for call in records.calls}
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for span in records.device:
        if span.is_pageable:
            call = calls.get(span.correlation)
            blocked = call.end - call.start if call is not None else span.end - span.start
            found[view.where(call) if call is not None else "", span.name].append(blocked)
    made = []
    for (where, name), ns in found.items():
        us = median(ns) / 1e3
        place = f" in {where}" if where else ""
        text = (
            f"{len(ns)} pageable copies{place} ({name}), each blocking the host for {us:.0f} "
            "us "
            "(median): use page-locked memory"
        )
        made.append(Finding(FindingKind.PAGEABLE, len(ns), us, where, text))
    return made


def synchronizations(records: Records, view: HostView) -> list[Finding]:
    """Calls that block the host on the device, but for the commit's own wait (I7), by call and
    place.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in records.calls:
        if classify(call.name) in BLOCKING and not _is_commit_wait(call, view):
            found[call.name, view.where(call)].append(call.end - call.start)
    made = []
    for (name, where), ns in found.items():
        us = median(ns) / 1e3
        place = f" in {where}" if where else ""
        text = f"{len(ns)} calls of {name}{place}, each blocking the host for {us:.0f} us (median)"
        made.append(Finding(FindingKind.SYNC, len(ns), us, where or name, text))
    return made


def _is_commit_wait(call: ApiCall, view: HostView) -> bool:
    return (
        classify(call.name) is CallKind.EVENT_WAIT
        and view.phase(call.thread, call.start) is Phase.WAIT
    )


def allocations(records: Records, view: HostView) -> list[Finding]:
    """Calls that allocate or free memory, by call and place."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in records.calls:
        if classify(call.name) is CallKind.ALLOCATION:
            found[call.name, view.where(call)].append(call.end - call.start)
    made = []
    for (name, where), ns in found.items():
        us = median(ns) / 1e3
        place = f" in {where}" if where else ""
        text = f"{len(ns)} calls of {name}{place}, {us:.1f} us each (median)"
        made.append(Finding(FindingKind.ALLOCATION, len(ns), us, where or name, text))
    return made


def zombies(records: Records, steps: Steps) -> list[Finding]:
    """Rows of steps whose sequence had ended, and what the device spent on steps of nothing
    else.
    """
    rows = sum(commit.zombies for commit in records.commits)
    if not rows:
        return []
    every = sum(commit.rows for commit in records.commits)
    dead = {commit.step for commit in records.commits if commit.zombies == commit.rows}
    spent = [
        step.end - step.start
        for step in steps.steps
        if step.launch is not None and step.launch.step in dead
    ]
    us = sum(spent) / 1e3
    text = (
        f"{rows} of {every} rows were zombies; {len(dead)} steps had no other rows and took "
        f"{us:.0f} us of the device in all, "
        f"the other {rows - sum(c.rows for c in records.commits if c.step in dead)} rode along in "
        "steps that ran anyway"
    )
    return [Finding(FindingKind.ZOMBIES, rows, us / rows, "", text)]
