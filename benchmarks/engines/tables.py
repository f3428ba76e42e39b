"""The table of `benchmarks.peers` over the files of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.result import read_runs
from benchmarks.common.tables import cell_text, markdown_table

Entry = dict[str, Any]


def files_table(paths: list[Path]) -> str:
    """Markdown of the results of `benchmarks.peers` in `paths`: a line per model and engine, a
    column per batch with ms per step and the share of the floor; beneath it what figures hide.

    Raises ValueError, which names the file, for anything else.
    """
    entries: list[Entry] = []
    for path, run in ((file, run) for file in paths for run in read_runs(file)):
        if run["benchmark"] != "peers":
            found = f"a result of benchmarks.{run['benchmark']}"
            raise ValueError(f"{path}: {found}; give files of benchmarks.peers")
        entries += run["entries"]
    peers = [entry for entry in entries if entry.get("what") == "peer"]
    measured = [entry for entry in peers if "batch" in entry]
    batches = sorted({entry["batch"] for entry in measured})
    lines: dict[tuple[str, str], dict[int, Entry]] = {}
    for entry in measured:
        lines.setdefault((entry["model"], entry["title"]), {})[entry["batch"]] = entry
    rows = []
    for key, cells in lines.items():
        version = next((each["version"] for each in cells.values() if "version" in each), None)
        rows.append([*key, version, *(_cell(cells.get(batch)) for batch in batches)])
    header = ["model", "engine", "version", *(f"B={batch}" for batch in batches)]
    return "\n".join([markdown_table(header, rows), *_notes(peers, measured)])


def _cell(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    if entry["status"] != "ok":
        return "failed"
    return f"{cell_text(entry['ms_per_step'])} ({entry['floor_share']:.0%})"


def _notes(peers: list[Entry], measured: list[Entry]) -> list[str]:
    """Engines that were too slow for the window of the others, failed, or were not there."""
    tokens = {_name(e): e["window"]["last"] for e in measured if e["status"] == "ok"}
    longest = max(tokens.values(), default=0)
    shorter = {name: last for name, last in tokens.items() if last < longest}
    failed = [entry for entry in measured if entry["status"] == "failed"]
    missing = {e["title"]: e["reason"] for e in peers if e["status"] == "missing"}
    return [
        *(f"- {name}: {last} new tokens, not {longest}." for name, last in shorter.items()),
        *(f"- {_name(entry)}: failed: {entry['error']}" for entry in failed),
        *(f"- {title} was not there: {reason}." for title, reason in missing.items()),
    ]


def _name(entry: Entry) -> str:
    return f"{entry['title']}, {entry['model']}, B={entry['batch']}"
