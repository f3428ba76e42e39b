"""The table of a ladder, from the entries of a result file of `benchmarks.adopt`."""

from __future__ import annotations

from typing import Any

from benchmarks.common.tables import Table

HEADER = (
    *("stage", "what changes", "ms/step", "in all", "first 8 ms", "gap share"),
    *("allocations", "tokens equal"),
)

Entry = dict[str, Any]


def adopt_tables(data: Entry) -> list[Table]:
    """A table per loop."""
    loops = dict.fromkeys(entry["loop"] for entry in data["entries"])
    return [ladder_table(data["entries"], loop) for loop in loops]


def ladder_table(entries: list[Entry], loop: str) -> Table:
    """The stages of one loop in order, and the sentence on each."""
    own = [entry for entry in entries if entry["loop"] == loop]
    steps = [entry for entry in own if entry["what"] == "steps"]
    records = {e["stage"]: e for e in own if e["what"] == "records" and e["status"] == "ok"}
    timed = [entry for entry in steps if entry["status"] == "ok"]
    rows = [
        _row(entry, records.get(entry["stage"], {}), timed[0] if timed else entry)
        for entry in steps
    ]
    remarks = [f"{entry['stage']}: {entry['verdict']}" for entry in timed if "verdict" in entry]
    return Table(f"{loop} loop", HEADER, rows, remarks)


def _row(entry: Entry, records: Entry, first: Entry) -> list[object]:
    label = [entry["stage"], entry["changes"]]
    if entry["status"] != "ok":
        return [*label, *[None] * 5, entry["status"]]
    share = records.get("gap_share")
    return [
        *label,
        entry["ms_per_step"],
        f"x{first['ms_per_step'] / entry['ms_per_step']:.2f}",
        entry["first_ms"],
        None if share is None else f"{share:.1%}",
        records.get("allocations_per_step"),
        f"{entry['tokens_equal']} of {entry['tokens']}",
    ]
