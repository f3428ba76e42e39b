"""Writes a timeline's files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from photon_ext.observe.analysis.report import Report
from photon_ext.observe.records import Records
from photon_ext.observe.render.page import page
from photon_ext.observe.render.perfetto import trace_events


def save(records: Records, report: Report, directory: Path) -> list[Path]:
    """See Timeline.save."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "trace.json": json.dumps(trace_events(records, report), separators=(",", ":")),
        "timeline.html": page(records, report),
        "summary.txt": report.text(),
        "summary.json": json.dumps(report.as_dict(), indent=1) + "\n",
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    written = [directory / name for name in texts]
    if has_matplotlib():
        from photon_ext.observe.render.picture import draw

        written.append(directory / "timeline.png")
        draw(records, report, written[-1])
    return written


def has_matplotlib() -> bool:
    """Whether a PNG can be drawn: pip install matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None
