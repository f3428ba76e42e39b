"""What has been measured, and which results are stale: made from other sources than the present
tree's.

    python -m benchmarks.report [DIRECTORY]
    python -m benchmarks.report --markdown FILE.json

Of a directory it lists the results; of a file of `benchmarks.bubble` or `benchmarks.adopt` it
prints the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from benchmarks.common.adopt_tables import adopt_sections
from benchmarks.common.bubble_tables import bubble_sections
from benchmarks.common.command import command
from benchmarks.common.digest import source_digest
from benchmarks.common.env import REPOSITORY
from benchmarks.common.result import read_result
from benchmarks.common.section import Section
from benchmarks.common.table import print_table

TABLES: dict[str, Callable[[dict[str, Any]], list[Section]]] = {
    "bubble": bubble_sections,
    "adopt": adopt_sections,
}
# what reading a file raises that holds something else
DAMAGES = (ValueError, KeyError, TypeError, AttributeError, IndexError)
RESULTS = Path(__file__).resolve().parent / "results"


class State(Enum):
    """Whether a result tells about the present sources."""

    CURRENT = "current"
    STALE = "stale"
    UNREADABLE = "unreadable"


class Listed(NamedTuple):
    """One result file; `figures` are its headline."""

    path: Path
    state: State
    data: dict[str, Any]
    figures: str


def read_results(directory: Path, digest: str) -> list[Listed]:
    """Every .json under `directory`, oldest first; a file that is no result is listed as
    unreadable.
    """
    listed = [_read(path, digest) for path in sorted(directory.rglob("*.json"))]
    return sorted(listed, key=lambda item: str(item.data.get("started", "")))


def _read(path: Path, digest: str) -> Listed:
    try:
        data = read_result(path)
        state = State.CURRENT if data["environment"].get("sources") == digest else State.STALE
        return Listed(path, state, data, headline(data))
    except DAMAGES:
        return Listed(path, State.UNREADABLE, {}, "")


def headline(data: dict[str, Any]) -> str:
    """The figures of one result in a line."""
    entries = [entry for entry in data.get("entries", ()) if entry.get("status") == "ok"]
    parts = []
    for entry in entries:
        fast = " fast" if entry.get("kernels") == "fast" else ""
        if entry.get("what") == "decode":
            parts.append(
                f"{entry['model']} B{entry['batch']} d{entry['depth']}{fast} "
                f"{entry['ms_per_step']['median']:.3g} ms"
            )
        elif entry.get("what") == "counts":
            parts.append(
                f"{entry['model']} B{entry['batch']} {entry['way']} "
                f"{'pass' if entry['passed'] else 'FAIL'}"
            )
        elif entry.get("what") == "single stream":
            parts += [
                f"{label} {own['tokens_per_s']:.3g} tok/s" for label, own in entry["rates"].items()
            ]
        elif entry.get("what") == "steps":
            parts.append(f"{entry['loop']} {entry['stage']}{fast} {entry['ms_per_step']:.3g} ms")
        elif entry.get("what") == "gain":
            parts.append(
                f"{entry['model']} x{entry['streams']} {entry['observed']:+.1%} (predicted "
                f"{entry['predicted']:+.1%})"
            )
        elif entry.get("what") == "meter":
            parts.append(
                f"{entry['model']} x{entry['streams']} meter on over off x{entry['ratio']:.3f}"
            )
        elif entry.get("what") == "timeline":
            parts.append(
                f"{entry['model']} B{entry['batch']} timeline off over none x{entry['ratio']:.3f}"
            )
        elif entry.get("what") == "long":
            parts.append(
                f"{entry['model']} long d{entry['depth']} {entry['wall_s']:.1f} s, "
                f"{entry['active_share']:.1%} active"
            )
        elif entry.get("what") == "peer":
            parts.append(f"{entry['peer']} B{entry['batch']} {entry['ms_per_step']:.3g} ms")
        elif entry.get("what") == "layers":
            parts.append(f"{entry['model']} B{entry['batch']} {entry['way']} {entry['share']:.0%}")
        elif "bytes_per_s" in entry and len(entries) == 1:
            parts.append(f"{entry['bytes_per_s'] / 1e9:.0f} GB/s")
    return ", ".join(parts)


def show_tables(path: Path, markdown: bool) -> int:
    """Prints the tables of one result."""
    try:
        data = read_result(path)
        if (tables := TABLES.get(data["benchmark"])) is None:
            raise ValueError(
                f"{path} is no result of {' or '.join(TABLES)}; give the directory for a list"
            )
        sections = tables(data)
    except DAMAGES as error:
        told = (
            str(error)
            if isinstance(error, ValueError)
            else f"{path} is damaged: {type(error).__name__}: {error}"
        )
        print(f"report: {told}", file=sys.stderr)
        return 1
    for section in sections:
        if markdown:
            print(section.markdown(), end="")
        else:
            section.show()
    return 0


def main(given: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog=command(), description=__doc__.splitlines()[0])
    options.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=RESULTS,
        help="a directory of results, or one result whose tables to print",
    )
    options.add_argument("--markdown", action="store_true", help="tables of one result as Markdown")
    args = options.parse_args(given)
    if not args.path.exists():
        options.error(f"{args.path}: no such file or directory")
    return show_tables(args.path, args.markdown) if args.path.is_file() else list_results(args.path)


def list_results(directory: Path) -> int:
    """Prints a line per result."""
    results = read_results(directory, source_digest(REPOSITORY))
    rows = []
    for path, state, data, figures in results:
        environment = data.get("environment", {})
        entries = data.get("entries", [])
        statuses = [entry.get("status") for entry in entries]
        failed = statuses.count("failed")
        rows.append(
            [
                path.relative_to(directory).as_posix(),
                data.get("benchmark", "?"),
                data.get("started", "?"),
                environment.get("gpu") or environment.get("cpu") or "?",
                str(environment.get("commit") or "?")[:10],
                f"{statuses.count('ok')}",
                f"{failed}",
                state.value,
                shorten(figures, 100, placeholder=" ..."),
            ]
        )
    if rows:
        print_table(
            ("file", "benchmark", "started", "on", "commit", "ok", "failed", "state", "figures"),
            rows,
        )
    stale = sum(item.state is not State.CURRENT for item in results)
    print(f"{len(results)} results in {directory}, {stale} of them stale or unreadable")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
