"""A timeline as a PNG: some steps from its middle as lanes, and whom the device waited for.

Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from photon_ext.observe.analysis.report import Report
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import COLOURS, IDLE, LEGEND, WHITE, Box, Lane, make_lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS_SHOWN = 6
WIDTH, DPI = 14.0, 100
LONGEST_NAME = 60
LABEL_SHARE = 0.035  # of the width: narrower boxes carry no label


def draw(records: Records, report: Report, path: Path) -> None:
    """Writes the picture to `path`. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    start, end = _middle(records, report)
    lanes = [Lane(x.name, _cut(x.boxes, start, end)) for x in make_lanes(records, report)]
    lanes = [lane for lane in lanes if lane.boxes]
    high = max(4.6, 0.42 * len(lanes))  # inches; both legends have room beside the lanes
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.06)  # no label at the edge
    figure = Figure(figsize=(WIDTH, high + 3.6), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    main, bars = figure.subplots(2, 1, height_ratios=[high, 1.9])
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left")
    _draw_lanes(main, lanes, (start, end), records.start)
    _draw_bars(bars, report)
    figure.savefig(path)


def _title(report: Report) -> str:
    parts = [f"{report.backend_text}: {len(report.steps.steps)} steps"]
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
    run = [step for place, step in enumerate(chosen) if step.number == chosen[0].number + place]
    margin = (run[-1].end - run[0].start) // 20
    return run[0].start - margin, run[-1].end + margin


def _cut(boxes: Sequence[Box], start: int, end: int) -> list[Box]:
    inside = (box for box in boxes if box.end > start and box.start < end)
    return [box._replace(start=max(box.start, start), end=min(box.end, end)) for box in inside]


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], window: tuple[int, int], zero: int) -> None:
    axes.set_title("steps from the middle: host above, device below", fontsize=9, loc="left")
    used: dict[str, Any] = {}
    for y, lane in enumerate(reversed(lanes)):
        for colour in dict.fromkeys(box.colour for box in lane.boxes):
            mine = (box for box in lane.boxes if box.colour == colour)
            ranges = [((box.start - zero) / 1e6, (box.end - box.start) / 1e6) for box in mine]
            idle = colour == IDLE
            drawn = axes.broken_barh(
                ranges,
                (y - 0.4, 0.8),
                facecolors=COLOURS[colour],
                # of its own colour, so that a span narrower than a pixel still shows
                edgecolor="white" if idle else COLOURS[colour],
                linewidth=0.2 if idle or lane.name == "device: kernels" else 1.0,
                hatch="///" if idle else None,
            )
            used.setdefault(colour, drawn)
        _label(axes, lane, y, window, zero)
    names = [_drawable(lane.name) for lane in reversed(lanes)]
    axes.set_yticks(range(len(lanes)), names, parse_math=False)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(*((edge - zero) / 1e6 for edge in window))
    axes.set_xlabel("time since the recording began (ms)")
    _draw_legends(axes, used)


def _draw_legends(axes: Axes, used: dict[str, Any]) -> None:
    """One for the host's phases, beside the top; one for the device, beside the bottom."""
    from matplotlib.legend import Legend

    for title, place, y in (("host", "upper left", 1.0), ("device", "lower left", 0.0)):
        names = [name for name in LEGEND[title] if name in used]
        if names:
            where: dict[str, Any] = {"loc": place, "bbox_to_anchor": (1.0, y), "alignment": "left"}
            handles = [used[name] for name in names]
            legend = Legend(axes, handles, names, title=title, frameon=False, fontsize=9, **where)
            axes.add_artist(legend).set_clip_on(False)  # it stands outside of the axes


def _label(axes: Axes, lane: Lane, y: int, window: tuple[int, int], zero: int) -> None:
    """Names in boxes that are wide enough for them."""
    whole = window[1] - window[0]
    for box in lane.boxes:
        if box.end - box.start < whole * max(LABEL_SHARE, 0.008 * len(box.title)):
            continue
        style: dict[str, Any] = {"fontsize": 8, "ha": "center", "va": "center", "clip_on": True}
        style["color"] = "white" if box.colour in WHITE else "black"
        if box.colour == IDLE:  # off the hatching
            style["bbox"] = {"facecolor": COLOURS[IDLE], "edgecolor": "none", "pad": 1.5}
        middle = ((box.start + box.end) / 2 - zero) / 1e6
        axes.text(middle, y, _drawable(box.title), parse_math=False, **style)


def _drawable(name: str) -> str:
    """Of a range or a thread, which may have any name: matplotlib draws no half of a surrogate
    pair, and a long one leaves no room."""
    text = name.encode(errors="replace").decode()
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _draw_bars(axes: Axes, report: Report) -> None:
    """Whom the device waited for, microseconds per steady step."""
    title = "whom the device waited for in step and split gaps, mean per steady step"
    axes.set_title(title, fontsize=9, loc="left")
    causes = list(report.waited_us.items())[:5] or [("no gaps", 0.0)]
    names = [_drawable(name) for name, _ in reversed(causes)]
    values = [us for _, us in reversed(causes)]
    bars = axes.barh(range(len(names)), values, color=COLOURS[IDLE], height=0.6)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.bar_label(bars, [f"{value:.1f} us" for value in values], padding=3, fontsize=9)
    axes.set_xlabel("us per steady step (mean)")
    axes.set_xlim(0, max([*values, 1.0]) * 1.15)
    axes.set_ylim(len(values) - 5.5, len(values) - 0.5)  # a single cause is a bar, not a wall
