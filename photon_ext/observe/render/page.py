"""A timeline as one HTML file: zoom, hover, a list of steps; nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from photon_ext.observe.analysis.gaps import GapKind
from photon_ext.observe.analysis.report import Report
from photon_ext.observe.records import Records
from photon_ext.observe.render.lanes import (
    COLOURS,
    IDLE,
    Lane,
    gap_text,
    make_lanes,
    slot_name,
    step_text,
    step_title,
    takes_white,
)

BOXES = 400_000  # of one lane; a page that holds more is too heavy to open
TEMPLATE = Path(__file__).with_name("page.html")


def page(records: Records, report: Report) -> str:
    """The whole document."""
    data = {
        "colours": COLOURS,
        "idle": IDLE,
        "white": [name for name in COLOURS if takes_white(name)],
        "end": (records.end - records.start) / 1e3,
        "lanes": [_lane(lane, records.start) for lane in make_lanes(records, report)],
        "steps": _steps(report, records.start),
    }
    # "<" may not stand in a script, where a kernel's name could close it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        TEMPLATE.read_text(encoding="utf-8")
        .replace("@SUMMARY@", html.escape(report.text()))
        .replace("@DATA@", text)
    )


def _lane(lane: Lane, zero: int) -> dict[str, Any]:
    """A lane as flat numbers, microseconds, with its distinct texts apart: begin, length,
    colour, title, text.
    """
    words: dict[str, int] = {}
    boxes: list[float | int] = []

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    for box in lane.boxes[:BOXES]:
        boxes += [
            (box.start - zero) / 1e3,
            (box.end - box.start) / 1e3,
            word(box.colour),
            word(box.title),
            word(box.text),
        ]
    return {
        "name": lane.name,
        "words": list(words),
        "boxes": boxes,
        "dropped": max(0, len(lane.boxes) - BOXES),
    }


def _steps(report: Report, zero: int) -> list[dict[str, Any]]:
    """The list of steps, microseconds: `before` is the gap before a step, `gaps` that and the one
    before its late sampling, `idle` when those begin and end.
    """
    before = {gap.step: gap for gap in report.gaps if gap.kind is GapKind.STEP}
    split = {gap.step: gap for gap in report.gaps if gap.kind is GapKind.SPLIT}
    made = []
    for step in report.steps.steps:
        gaps = [found[step.number] for found in (split, before) if step.number in found]
        made.append(
            {
                "title": step_title(step),
                "slot": slot_name(step),
                "start": (step.start - zero) / 1e3,
                "us": (step.end - step.start) / 1e3,
                "before": before[step.number].ns / 1e3 if step.number in before else 0,
                "gaps": sum(gap.ns for gap in gaps) / 1e3,
                "idle": [((gap.start - zero) / 1e3, (gap.end - zero) / 1e3) for gap in gaps],
                "cause": "; ".join(filter(None, map(gap_text, gaps))),
                "text": step_text(step),
            }
        )
    return made
