"""A timeline as a PNG: all of it as a strip, some steps from its middle as lanes, and whom the
device waited for. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from photon_ext.observe.analysis.gaps import GapKind
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.analysis.text import backend_text
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import COLOURS, IDLE, Box, Lane, make_lanes, takes_white

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS_SHOWN = 6
STRIP_BINS = 400
WIDTH, DPI = 14.0, 100
LONGEST_NAME = 60
LABEL_SHARE = 0.035  # of the width: narrower boxes carry no label


def draw(records: Records, report: Report, path: Path) -> None:
    """Writes the picture to `path`. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lanes = make_lanes(records, report)
    start, end = _middle(records, report)
    shown = [
        lane
        for lane in (Lane(lane.name, _cut(lane.boxes, start, end)) for lane in lanes)
        if lane.boxes
    ]
    figure = Figure(
        figsize=(WIDTH, 3.6 + 0.42 * len(shown) + 1.9),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.06),
    )  # inches: no label at the edge
    FigureCanvasAgg(figure)
    strip, main, bars = figure.subplots(3, 1, height_ratios=[0.9, max(2.0, 0.42 * len(shown)), 1.9])
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left")
    _draw_strip(strip, records, report, (start, end))
    _draw_lanes(main, shown, start, end, records.start)
    _draw_bars(bars, report)
    figure.savefig(path)


def _title(report: Report) -> str:
    parts = [f"{backend_text(report)}: {len(report.steps.steps)} steps"]
    if report.active is not None:
        parts.append(f"active {100 * report.active:.1f} %")
    if report.figures is not None:
        parts.append(f"step {report.figures.wall_us / 1e3:.3f} ms")
    if report.step_gap is not None:
        parts.append(f"step gap {report.step_gap.median_us:.1f} us (median)")
    return ", ".join(parts)


def _middle(records: Records, report: Report) -> tuple[int, int]:
    """The window of the lanes: a few steady steps around the middle, else everything."""
    steady = report.steps.steady or report.steps.steps
    if not steady:
        return records.start, max(records.end, records.start + 1)
    first = max(0, len(steady) // 2 - STEPS_SHOWN // 2)
    chosen = steady[first : first + STEPS_SHOWN]
    run = [chosen[0]]
    for step in chosen[1:]:
        if step.number != run[-1].number + 1:
            break
        run.append(step)
    margin = (run[-1].end - run[0].start) // 20
    return run[0].start - margin, run[-1].end + margin


def _cut(boxes: Sequence[Box], start: int, end: int) -> list[Box]:
    return [
        box._replace(start=max(box.start, start), end=min(box.end, end))
        for box in boxes
        if box.end > start and box.start < end
    ]


def _draw_strip(axes: Axes, records: Records, report: Report, window: tuple[int, int]) -> None:
    """The share of idle device over the whole recording."""
    axes.set_title(
        "idle device over the whole recording (step gaps); the lanes below show the stretch "
        "between the lines",
        fontsize=9,
        loc="left",
    )
    steps = report.steps.steps
    begin, end = (steps[0].start, steps[-1].end) if steps else (records.start, records.end)
    width = max(1, (end - begin) / STRIP_BINS)
    idle = [0.0] * STRIP_BINS
    for gap in report.gaps:
        if gap.kind not in (GapKind.STEP, GapKind.SPLIT):
            continue
        place = int((gap.start - begin) / width)
        while place < STRIP_BINS and begin + place * width < gap.end:
            overlap = min(gap.end, begin + (place + 1) * width) - max(
                gap.start, begin + place * width
            )
            idle[place] += max(0.0, overlap) / width
            place += 1
    lefts = [(begin + place * width - records.start) / 1e6 for place in range(STRIP_BINS)]
    axes.bar(
        lefts,
        [100 * min(1.0, share) for share in idle],
        width=width / 1e6,
        align="edge",
        color=COLOURS[IDLE],
    )
    axes.set_ylim(0, 100)
    axes.set_xlim(lefts[0], lefts[-1] + width / 1e6)
    axes.set_ylabel("idle (%)")
    axes.set_xlabel("time since the recording began (ms)")
    for edge in window:
        axes.axvline((edge - records.start) / 1e6, color="black", linewidth=1)


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], start: int, end: int, zero: int) -> None:
    axes.set_title(
        "lanes: host above, device below; slots by colour, idle hatched", fontsize=9, loc="left"
    )
    used: dict[str, Any] = {}
    for row, lane in enumerate(lanes):
        y = len(lanes) - 1 - row
        for colour in dict.fromkeys(box.colour for box in lane.boxes):
            mine = [box for box in lane.boxes if box.colour == colour]
            ranges = [((box.start - zero) / 1e6, (box.end - box.start) / 1e6) for box in mine]
            thin = lane.name == "device: kernels"
            # of its own colour: a span narrower than a pixel still shows
            edge = "white" if colour == IDLE else COLOURS[colour]
            hatch = "///" if colour == IDLE else None
            width = 0.2 if colour == IDLE or thin else 1.0
            drawn = axes.broken_barh(
                ranges,
                (y - 0.4, 0.8),
                facecolors=COLOURS[colour],
                edgecolor=edge,
                linewidth=width,
                hatch=hatch,
            )
            used.setdefault(colour, drawn)
        _label(axes, lane, y, start, end, zero)
    axes.set_yticks(
        range(len(lanes)), [_drawable(lane.name) for lane in reversed(lanes)], parse_math=False
    )
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim((start - zero) / 1e6, (end - zero) / 1e6)
    axes.set_xlabel("time since the recording began (ms)")
    if used:
        axes.legend(
            used.values(),
            used.keys(),
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            fontsize=9,
            frameon=False,
        )


def _label(axes: Axes, lane: Lane, y: int, start: int, end: int, zero: int) -> None:
    """Names in boxes that are wide enough for them."""
    for box in lane.boxes:
        if (
            box.end - box.start >= LABEL_SHARE * (end - start)
            and len(box.title) * 0.008 * (end - start) < box.end - box.start
        ):
            colour = "white" if takes_white(box.colour) else "black"
            middle = ((box.start + box.end) / 2 - zero) / 1e6
            # off the hatching
            under = (
                {"facecolor": COLOURS[IDLE], "edgecolor": "none", "pad": 1.5}
                if box.colour == IDLE
                else None
            )
            style: dict[str, Any] = {
                "fontsize": 8,
                "color": colour,
                "bbox": under,
                "parse_math": False,
            }
            axes.text(
                middle, y, _drawable(box.title), ha="center", va="center", clip_on=True, **style
            )


def _drawable(name: str) -> str:
    """Of a range or a thread, which may have any name: matplotlib draws no half of a surrogate
    pair, and a long one leaves no room.
    """
    text = name.encode(errors="replace").decode()
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _draw_bars(axes: Axes, report: Report) -> None:
    """Whom the device waited for, microseconds per steady step."""
    axes.set_title(
        "whom the device waited for in step and split gaps, mean per steady step",
        fontsize=9,
        loc="left",
    )
    causes = list(report.waited_us.items())[:5] or [("no gaps", 0.0)]
    names, values = [name for name, _ in reversed(causes)], [us for _, us in reversed(causes)]
    bars = axes.barh(names, values, color=COLOURS[IDLE], height=0.6)
    axes.bar_label(bars, [f"{value:.1f} us" for value in values], padding=3, fontsize=9)
    axes.set_xlabel("us per steady step (mean)")
    axes.set_xlim(0, max([*values, 1.0]) * 1.15)
    axes.set_ylim(len(values) - 5.5, len(values) - 0.5)  # a single cause is a bar, not a wall
