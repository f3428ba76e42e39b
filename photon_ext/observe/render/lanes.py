"""What the pictures show, and in which colours: lanes of coloured spans, for PNG and HTML.

Colours are those of Okabe and Ito, and of Paul Tol. Those of one lane were chosen to be told apart
with colour-blindness, too (a test simulates it); idle, the only red, is hatched in the PNG.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import Gap, GapKind, idle_gaps
from photon_ext.observe.analysis.intervals import by_thread, flatten
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.analysis.steps import DeviceStep, Steps, short_name
from photon_ext.observe.records import DeviceKind, OpKind, Records

IDLE = "idle"
DESCHEDULED = DeviceKind.DESCHEDULED.value
LEGEND = {
    "host": {
        "admit": "#44AA99",
        "plan": "#882255",
        "launch": "#332288",
        "wait": "#DDDDDD",
        "commit": "#99DDFF",
        "mask": "#AA4499",
        "finalize": "#E69F00",
        "deliver": "#117733",
        "delay": "#CC6677",
        "collect": "#DDCC77",
        "torch op": "#999999",
    },
    "device": {
        "slot A": "#0072B2",
        "slot B": "#56B4E9",
        "even step": "#0072B2",
        "odd step": "#56B4E9",
        "prefill": "#666633",
        "copy": "#BBCC33",
        IDLE: "#D55E00",
        DESCHEDULED: "#F0E442",
    },
}
"""Colours by name, in two legends: what the host does, and what the device does."""
COLOURS = {name: colour for group in LEGEND.values() for name, colour in group.items()}
WHITE = ("plan", "launch", "mask", "deliver", "slot A", "even step", "prefill", IDLE)  # text on it
SLOTS, TURNS = ("slot A", "slot B"), ("even step", "odd step")


class Box(NamedTuple):
    """A span in a lane, nanoseconds; `colour` is a key of COLOURS, `text` says what and why."""

    start: int
    end: int
    colour: str
    title: str
    text: str = ""


class Lane(NamedTuple):
    """A row of boxes that do not overlap."""

    name: str
    boxes: list[Box]


def make_lanes(records: Records, report: Report) -> list[Lane]:
    """Host threads with phases of ours, or torch ops; steps with the idle time between them;
    kernels; copies. Empty ones are left out."""
    lanes = [*_host_lanes(records, report.steps)]
    lanes.append(Lane("device: steps", list(_step_boxes(report))))
    lanes.append(Lane("device: kernels", sorted(_kernel_boxes(records, report))))
    for name, wanted in (("copies in", "HtoD"), ("copies out", "DtoH")):
        copies = (s for s in records.device if s.kind is DeviceKind.COPY)
        mine = (span for span in copies if span.name.startswith(wanted))
        boxes = [
            Box(s.start, s.end, "copy", s.name, f"{s.bytes} bytes" * bool(s.bytes)) for s in mine
        ]
        lanes.append(Lane(name, boxes))
    return [lane for lane in lanes if lane.boxes]


def slot_name(step: DeviceStep) -> str:
    """The step's colour: its slot; where no slot is known, whether its number is even."""
    if step.launch is None:
        return TURNS[step.number % 2]
    return "prefill" if step.launch.kind == "prefill" else SLOTS[step.launch.slot % 2]


def step_text(step: DeviceStep) -> str:
    """What is known of a step, for a tooltip or a list."""
    parts = [f"{step.kernels} kernels", f"kernels run {step.busy / 1e3:.1f} us"]
    if (launch := step.launch) is not None:
        slot = f"slot {'AB'[launch.slot % 2]}{', late sampling' * launch.split}"
        parts.insert(0, f"{launch.kind}, {launch.rows} rows, {launch.tokens} tokens, {slot}")
    if step.excluded is not None:
        parts.append(f"not steady: {step.excluded}")
    return "; ".join(parts)


def gap_text(gap: Gap) -> str:
    """Whom the device waited for."""
    return "; ".join(f"{share.name} {share.ns / 1e3:.1f} us" for share in gap.shares)


def _host_lanes(records: Records, steps: Steps) -> Iterator[Lane]:
    spans = by_thread(records.host)
    ops = by_thread([op for op in records.ops if op.kind is not OpKind.PYTHON])
    for thread in dict.fromkeys((*spans, *ops)):
        name = records.threads.get(thread, f"thread {thread}")
        phases = []
        for start, end, path in flatten(spans.get(thread, [])):
            number, phase = steps.number(path[-1].step), path[-1].phase.value
            phases.append(Box(start, end, phase, phase, "" if number is None else f"step {number}"))
        yield Lane(f"host: {name}", phases)
        called = []
        for start, end, path in flatten(ops.get(thread, [])):
            title = next((op.name for op in path if op.kind is OpKind.TORCH), path[0].name)
            called.append(Box(start, end, "torch op", title, " > ".join(op.name for op in path)))
        yield Lane(f"torch ops: {name}", called)


def _step_boxes(report: Report) -> Iterator[Box]:
    """Steps and the step and split gaps, in order of time; a split gap cuts its step in two."""
    gaps = {(gap.step, gap.kind): gap for gap in idle_gaps(report.gaps)}
    for step in report.steps.steps:
        if (gap := gaps.get((step.number, GapKind.STEP))) is not None:
            yield Box(gap.start, gap.end, IDLE, GapKind.STEP.value, gap_text(gap))
        title, text, colour = f"step {step.number}", step_text(step), slot_name(step)
        hole = gaps.get((step.number, GapKind.SPLIT))
        if hole is None:
            yield Box(step.start, step.end, colour, title, text)
        else:
            yield Box(step.start, hole.start, colour, title, f"forward; {text}")
            yield Box(hole.start, hole.end, IDLE, GapKind.SPLIT.value, gap_text(hole))
            yield Box(hole.end, step.end, colour, title, f"late sampling; {text}")


def _kernel_boxes(records: Records, report: Report) -> Iterator[Box]:
    steps = report.steps
    for step in steps.steps:
        for kernel in steps.of(step):
            full = kernel.name if "(" in kernel.name else ""
            yield Box(kernel.start, kernel.end, slot_name(step), short_name(kernel.name), full)
    if not steps.steps:
        for kernel in steps.kernels:
            yield Box(kernel.start, kernel.end, TURNS[0], short_name(kernel.name))
    for span in records.device:
        if span.kind is DeviceKind.DESCHEDULED:
            text = "the system had taken the stream's thread off the CPU"
            yield Box(span.start, span.end, DESCHEDULED, DESCHEDULED, text)
