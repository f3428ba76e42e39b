"""The table of ours beside the peers, in Markdown, from the files that benchmarks.peers has
written.

python -m benchmarks.peer_table benchmarks/results/peers-*.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.result import read_result
from benchmarks.common.table import cell_text, markdown_table


def table(entries: list[dict[str, Any]]) -> str:
    """A line per model and engine, a column per batch: ms per step; beneath it what a figure
    alone would hide.
    """
    peers = [entry for entry in entries if entry.get("what") == "peer"]
    measured = [entry for entry in peers if "batch" in entry]
    batches = sorted({entry["batch"] for entry in measured})
    lines: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for entry in measured:
        lines.setdefault((entry["model"], entry["title"]), {})[entry["batch"]] = entry
    rows = [
        [*key, _version(cells), *(_cell(cells.get(batch)) for batch in batches)]
        for key, cells in lines.items()
    ]
    notes = [*_shorter(measured), *_failures(measured), *_missing(peers)]
    return "\n".join(
        [
            markdown_table(
                ["model", "engine", "version", *(f"B={batch}" for batch in batches)], rows
            ),
            *notes,
        ]
    )


def _version(cells: dict[int, dict[str, Any]]) -> str | None:
    return next((entry["version"] for entry in cells.values() if "version" in entry), None)


def _cell(entry: dict[str, Any] | None) -> str | None:
    if entry is None:
        return None
    return cell_text(entry["ms_per_step"]) if entry["status"] == "ok" else "failed"


def _shorter(measured: list[dict[str, Any]]) -> list[str]:
    """Engines that were too slow for the window of the others."""
    tokens = {
        _name(entry): entry["window"]["last"] for entry in measured if entry["status"] == "ok"
    }
    longest = max(tokens.values(), default=0)
    return [
        f"- {name}: {last} new tokens, not {longest}."
        for name, last in tokens.items()
        if last < longest
    ]


def _failures(measured: list[dict[str, Any]]) -> list[str]:
    return [
        f"- {_name(entry)}: failed: {entry['error']}"
        for entry in measured
        if entry["status"] == "failed"
    ]


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['title']}, {entry['model']}, B={entry['batch']}"


def _missing(peers: list[dict[str, Any]]) -> list[str]:
    reasons = {entry["title"]: entry["reason"] for entry in peers if entry["status"] == "missing"}
    return [f"- {title} was not there: {reason}." for title, reason in reasons.items()]


def _entries(path: Path) -> list[dict[str, Any]]:
    data = read_result(path)
    if data["benchmark"] != "peers":
        raise ValueError(
            f"{path}: a result of benchmarks.{data['benchmark']}; give files of benchmarks.peers"
        )
    entries: list[dict[str, Any]] = data["entries"]
    return entries


def main(given: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog=command(), description=__doc__.splitlines()[0])
    options.add_argument("files", nargs="+", type=Path)
    args = options.parse_args(given)
    try:
        print(table([entry for path in args.files for entry in _entries(path)]))
    except ValueError as error:
        print(f"peer_table: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
