"""The table of a ladder, from the entries of a result file of `benchmarks.adopt`."""

from __future__ import annotations

from typing import Any

from benchmarks.common.section import Section
from benchmarks.ladder.stages import Changed

HEADER = (
    "stage",
    "what changes",
    "lines",
    "ms/step",
    "in all",
    "first 8 ms",
    "gap share",
    "allocations",
    "tokens equal",
)

Entry = dict[str, Any]


def adopt_sections(data: Entry) -> list[Section]:
    """A table per loop."""
    loops = dict.fromkeys(entry["loop"] for entry in data["entries"])
    return [ladder_section(data["entries"], loop) for loop in loops]


def ladder_section(entries: list[Entry], loop: str) -> Section:
    """The stages of one loop in order, and the sentence on each."""
    own = [entry for entry in entries if entry["loop"] == loop]
    steps = [entry for entry in own if entry["what"] == "steps"]
    records = {
        entry["stage"]: entry
        for entry in own
        if entry["what"] == "records" and entry["status"] == "ok"
    }
    timed = [entry for entry in steps if entry["status"] == "ok"]
    rows = [
        _row(entry, records.get(entry["stage"], {}), timed[0] if timed else entry)
        for entry in steps
    ]
    return Section(
        f"{loop} loop",
        HEADER,
        rows,
        [f"{entry['stage']}: {entry['verdict']}" for entry in timed if "verdict" in entry],
    )


def _row(entry: Entry, records: Entry, first: Entry) -> list[object]:
    if entry["status"] != "ok":
        return [
            entry["stage"],
            entry["changes"],
            None,
            None,
            None,
            None,
            None,
            None,
            entry["status"],
        ]
    share = records.get("gap_share")
    return [
        entry["stage"],
        entry["changes"],
        str(Changed(**entry["lines"])),
        entry["ms_per_step"],
        f"x{first['ms_per_step'] / entry['ms_per_step']:.2f}",
        entry["first_ms"],
        None if share is None else f"{share:.1%}",
        records.get("allocations_per_step"),
        f"{entry['tokens_equal']} of {entry['tokens']}",
    ]
