"""What the pictures show, and in which colours: lanes of coloured spans, made once for PNG, HTML
and Perfetto.

Colours are those of Okabe and Ito, and of Paul Tol. Whoever can stand beside each other was chosen
to be told apart with colour-blindness, too (a test simulates it); idle, the only red, is hatched
besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from photon_ext.observe.analysis.gaps import Gap, GapKind, share_name
from photon_ext.observe.analysis.intervals import flatten
from photon_ext.observe.analysis.phases import DevicePhase, phase_spans
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.analysis.steps import DeviceStep, Numbers, short_name
from photon_ext.observe.records import DeviceKind, HostSpan, Op, OpKind, Records

IDLE = "idle"
COLOURS = {
    "slot A": "#0072B2",
    "slot B": "#56B4E9",
    "even step": "#0072B2",
    "odd step": "#56B4E9",
    "prefill": "#666633",
    IDLE: "#D55E00",
    "plan": "#882255",
    "launch": "#332288",
    "wait": "#DDDDDD",
    "commit": "#99DDFF",
    "mask": "#AA4499",
    "finalize": "#E69F00",
    "deliver": "#117733",
    "collect": "#DDCC77",
    "torch op": "#999999",
    DevicePhase.CARRY_OVER.value: "#CC79A7",
    DevicePhase.FORWARD.value: "#009E73",
    DevicePhase.PREFILL.value: "#225555",
    DevicePhase.SAMPLING.value: "#222255",
    "copy": "#BBCC33",
}
SLOTS, TURNS = ("slot A", "slot B"), ("even step", "odd step")


class Box(NamedTuple):
    """A span in a lane, nanoseconds; `colour` is a key of COLOURS, `text` says what it is and
    why.
    """

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
    kernels; copies. Empty ones are left out.
    """
    lanes = list(_host_lanes(records, Numbers(report.steps.steps)))
    lanes.append(Lane("device: steps", list(_step_boxes(report))))
    lanes.append(Lane("device: phases", list(_phase_boxes(report))))
    lanes.append(Lane("device: kernels", list(_kernel_boxes(report))))
    lanes += _copy_lanes(records)
    return [lane for lane in lanes if lane.boxes]


def luminance(colour: str) -> float:
    """Of "#RRGGBB", 0..1 (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def takes_white(colour: str) -> bool:
    """Whether white text can be read on a key of COLOURS: black has less contrast on it, or
    about as much.
    """
    return luminance(COLOURS[colour]) < 0.26


def slot_name(step: DeviceStep) -> str:
    """The step's colour: its slot; where no slot is known, whether its number is even."""
    if step.launch is not None and step.launch.kind == "prefill":
        return "prefill"
    return SLOTS[step.launch.slot % 2] if step.launch is not None else TURNS[step.number % 2]


def step_text(step: DeviceStep) -> str:
    """What is known of a step, for a tooltip or a list."""
    parts = [f"{step.kernels} kernels", f"kernels run {step.busy / 1e3:.1f} us"]
    if step.launch is not None:
        launch = step.launch
        parts.insert(
            0,
            f"{launch.kind}, {launch.rows} rows, {launch.lines} lines, slot "
            f"{'AB'[launch.slot % 2]}{', late sampling' * launch.split}",
        )
    if step.excluded is not None:
        parts.append(f"not steady: {step.excluded}")
    return "; ".join(parts)


def step_title(step: DeviceStep) -> str:
    return f"step {step.number}"


def host_step(numbers: Numbers, span: HostSpan) -> int | None:
    """The number of the step that a span belongs to; None: to none, or to one outside the
    recording.
    """
    return None if span.step is None else numbers.at(span.step, span.end)


def gap_text(gap: Gap) -> str:
    """Whom the device waited for."""
    return "; ".join(f"{share_name(share)} {share.ns / 1e3:.1f} us" for share in gap.shares)


def _host_lanes(records: Records, numbers: Numbers) -> Iterator[Lane]:
    threads = list(
        dict.fromkeys([span.thread for span in records.host] + [op.thread for op in records.ops])
    )
    for thread in threads:
        name = records.threads.get(thread, f"thread {thread}")
        spans = [span for span in records.host if span.thread == thread]
        if spans:
            yield Lane(
                f"host: {name}",
                [
                    _phase_box(piece.start, piece.end, piece.path[-1], numbers)
                    for piece in flatten(spans)
                ],
            )
        ops = [op for op in records.ops if op.thread == thread and op.kind is not OpKind.PYTHON]
        if ops:
            yield Lane(
                f"torch ops: {name}",
                [_op_box(piece.start, piece.end, piece.path) for piece in flatten(ops)],
            )


def _phase_box(start: int, end: int, span: HostSpan, numbers: Numbers) -> Box:
    step = host_step(numbers, span)
    return Box(
        start, end, span.phase.value, span.phase.value, "" if step is None else f"step {step}"
    )


def _op_box(start: int, end: int, path: Sequence[Op]) -> Box:
    title = next((op.name for op in path if op.kind is OpKind.TORCH), path[0].name)
    return Box(start, end, "torch op", title, " > ".join(op.name for op in path))


def _step_boxes(report: Report) -> Iterator[Box]:
    """Steps and the step and split gaps, in order of time; a split gap cuts its step in two."""
    holes = {gap.step: gap for gap in report.gaps if gap.kind is GapKind.SPLIT}
    gaps = {gap.step: gap for gap in report.gaps if gap.kind is GapKind.STEP}
    for step in report.steps.steps:
        if (gap := gaps.get(step.number)) is not None:
            yield Box(gap.start, gap.end, IDLE, GapKind.STEP.value, gap_text(gap))
        title, text, colour = step_title(step), step_text(step), slot_name(step)
        hole = holes.get(step.number)
        if hole is None:
            yield Box(step.start, step.end, colour, title, text)
        else:
            yield Box(step.start, hole.start, colour, title, f"forward; {text}")
            yield Box(hole.start, hole.end, IDLE, GapKind.SPLIT.value, gap_text(hole))
            yield Box(hole.end, step.end, colour, title, f"late sampling; {text}")


def _phase_boxes(report: Report) -> Iterator[Box]:
    for step in report.steps.steps:
        for span in phase_spans(report.steps, step):
            yield Box(
                span.start,
                span.end,
                span.phase.value,
                span.phase.value,
                f"{step_title(step)}, {span.kernels} kernels",
            )


def _kernel_boxes(report: Report) -> Iterator[Box]:
    for step in report.steps.steps:
        colour = slot_name(step)
        for kernel in report.steps.of(step):
            yield Box(
                kernel.start,
                kernel.end,
                colour,
                short_name(kernel.name),
                kernel.name if "(" in kernel.name else "",
            )
    if not report.steps.steps:
        yield from (
            Box(kernel.start, kernel.end, TURNS[0], short_name(kernel.name))
            for kernel in report.steps.kernels
        )


def _copy_lanes(records: Records) -> Iterator[Lane]:
    for name, wanted in (("copies in", "HtoD"), ("copies out", "DtoH")):
        copies = [
            span
            for span in records.device
            if span.kind is DeviceKind.COPY and span.name.startswith(wanted)
        ]
        yield Lane(
            name,
            [
                Box(
                    span.start,
                    span.end,
                    "copy",
                    span.name,
                    f"{span.bytes} bytes" * bool(span.bytes),
                )
                for span in copies
            ],
        )
