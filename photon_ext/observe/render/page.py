"""A timeline as one HTML file: zoom, hover, a list of steps; nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from photon_ext.observe.analysis.gaps import GapKind, idle_gaps
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import (
    IDLE,
    LEGEND,
    WHITE,
    Lane,
    gap_text,
    make_lanes,
    slot_name,
    step_text,
)

BOXES = 400_000  # of one lane; a page that holds more is too heavy to open
TEMPLATE = Path(__file__).with_name("page.html")


def page(records: Records, report: Report) -> str:
    """The whole document."""
    data = {
        "legend": LEGEND,
        "idle": IDLE,
        "white": WHITE,
        "end": (records.end - records.start) / 1e3,
        "lanes": [_lane(lane, records.start) for lane in make_lanes(records, report)],
        "steps": list(_steps(report, records.start)),
    }
    # "<" may not stand in a script, where a kernel's name could close it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("@SUMMARY@", html.escape(report.text())).replace("@DATA@", text)


def _lane(lane: Lane, zero: int) -> dict[str, Any]:
    """A lane as flat numbers, with its distinct texts apart.

    Of a box: begin and length in microseconds, then the places of colour, title and text.
    """
    words: dict[str, int] = {}
    boxes: list[float | int] = []
    for box in lane.boxes[:BOXES]:
        texts = (box.colour, box.title, box.text)
        places = (words.setdefault(text, len(words)) for text in texts)
        boxes += [(box.start - zero) / 1e3, (box.end - box.start) / 1e3, *places]
    return {"name": lane.name, "words": list(words), "boxes": boxes}


def _steps(report: Report, zero: int) -> Iterator[dict[str, Any]]:
    """The list of steps, microseconds: `before` is the gap before a step, `gaps` that and the one
    before its late sampling."""
    found = {(gap.step, gap.kind): gap for gap in idle_gaps(report.gaps)}
    for step in report.steps.steps:
        before = found.get((step.number, GapKind.STEP))
        both = [gap for gap in (found.get((step.number, GapKind.SPLIT)), before) if gap is not None]
        yield {
            "title": f"step {step.number}",
            "slot": slot_name(step),
            "start": (step.start - zero) / 1e3,
            "us": (step.end - step.start) / 1e3,
            "before": before.ns / 1e3 if before is not None else 0,
            "gaps": sum(gap.ns for gap in both) / 1e3,
            "cause": "; ".join(filter(None, map(gap_text, both))),
            "text": step_text(step),
        }
