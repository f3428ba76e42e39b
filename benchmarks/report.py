"""What has been measured, and which results are stale: of other sources than this commit's.

    python -m benchmarks.report [DIRECTORY]
    python -m benchmarks.report --markdown FILE

Of a directory it lists the runs; of a file it prints their tables. A run is stale where git's
hash of csrc or photon_ext was another when it was measured, and unknown where that cannot be told:
without git's history, or from a changed tree.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from benchmarks.common.environment import source_trees
from benchmarks.common.options import plain_parser
from benchmarks.common.result import read_runs
from benchmarks.common.result_tables import tables_of
from benchmarks.common.tables import Table

DAMAGES = (ValueError, KeyError, TypeError, AttributeError, IndexError)  # of a file's content
RESULTS = Path(__file__).resolve().parent / "results"
HEADER = ("file", "benchmark", "started", "on", "commit", "ok", "failed", "state", "figures")


class State(Enum):
    """Whether a result tells about the present sources."""

    CURRENT = "current"
    STALE = "stale"
    UNKNOWN = "unknown"
    UNREADABLE = "unreadable"


class Listed(NamedTuple):
    """One run of a file; `figures` are its headline."""

    path: Path
    state: State
    data: dict[str, Any]
    figures: str


def list_runs(directory: Path) -> list[Listed]:
    """The runs of every .jsonl under `directory`, oldest first; what is no result is listed as
    unreadable."""
    present = source_trees("HEAD")
    listed = [run for path in sorted(directory.rglob("*.jsonl")) for run in _read(path, present)]
    return sorted(listed, key=lambda item: str(item.data.get("started", "")))


def _read(path: Path, present: dict[str, str] | None) -> list[Listed]:
    try:
        return [
            Listed(path, state_of(run["environment"], present), run, headline(run))
            for run in read_runs(path)
        ]
    except DAMAGES:
        return [Listed(path, State.UNREADABLE, {}, "")]


def state_of(environment: dict[str, Any], present: dict[str, str] | None) -> State:
    """Whether sources have changed since; results without `trees` are those of their commit."""
    trees = environment.get("trees")
    if trees is None and environment.get("commit"):
        trees = source_trees(str(environment["commit"]))
    if trees is None or present is None:
        return State.UNKNOWN
    if trees != present:
        return State.STALE
    return State.UNKNOWN if environment.get("dirty") else State.CURRENT


def headline(data: dict[str, Any]) -> str:
    """The figures of one run in a line."""
    entries = [entry for entry in data.get("entries", ()) if entry.get("status") == "ok"]
    floor = "bytes_per_s" in entries[0] if len(entries) == 1 else False
    if floor:
        return f"{entries[0]['bytes_per_s'] / 1e9:.0f} GB/s"
    return ", ".join(part for entry in entries for part in _figures(entry))


def _figures(entry: dict[str, Any]) -> list[str]:
    hopper = " hopper" if entry.get("kernels") in ("hopper", "fast") else ""
    if entry.get("what") == "single stream":
        return [f"{who} {own['tokens_per_s']:.3g} tok/s" for who, own in entry["rates"].items()]
    if "modes" in entry:
        of = f"{entry['model']} B{entry['batch']}"
        return [f"{of} {mode} x{own['ratio']:.3f}" for mode, own in entry["modes"].items()]
    form = {
        "decode": "{model} B{batch} d{depth}{hopper} {ms_per_step[median]:.3g} ms",
        "counts": "{model} B{batch} {way} {passed}",
        "steps": "{stage}{hopper} {ms_per_step:.3g} ms",
        "gain": "{model} x{streams} {observed:+.1%} (predicted {predicted:+.1%})",
        "meter": "{model} x{streams} meter on over off x{ratio:.3f}",
        "timeline": "{model} B{batch} timeline off over none x{ratio:.3f}",
        "long": "{model} long d{depth} {wall_s:.1f} s, {active_share:.1%} active",
        "peer": "{peer} B{batch} {ms_per_step:.3g} ms",
        "layers": "{model} B{batch} {way} {share:.0%}",
        "quality": "{model} {format} perplexity {perplexity:.4g}",
        "schemas": "{model} T{temperature} {counts} {passed}",
        "cell": "{model} {load} {title} {rate}/s {tokens_per_s:.0f} tok/s",
    }.get(entry.get("what", ""))
    passed = "pass" if entry.get("passed") else "FAIL"
    return [] if form is None else [form.format(**{**entry, "hopper": hopper, "passed": passed})]


def show_tables(path: Path, markdown: bool) -> int:
    """Prints the tables of one file."""
    try:
        made = [table for run in read_runs(path) for table in tables_of(run)]
    except DAMAGES as error:
        damage = f"{path} is damaged: {type(error).__name__}: {error}"
        print(f"report: {error if isinstance(error, ValueError) else damage}", file=sys.stderr)
        return 1
    for table in made:
        if markdown:
            print(table.markdown(), end="")
        else:
            table.show()
    return 0


def list_results(directory: Path) -> int:
    """Prints a line per run."""
    results = list_runs(directory)
    rows = []
    for path, state, data, figures in results:
        environment = data.get("environment", {})
        statuses = [entry.get("status") for entry in data.get("entries", [])]
        rows.append([
            path.relative_to(directory).as_posix(),
            data.get("benchmark", "?"),
            data.get("started", "?"),
            environment.get("gpu") or environment.get("cpu") or "?",
            str(environment.get("commit") or "?")[:10],
            str(statuses.count("ok")),
            str(statuses.count("failed")),
            state.value,
            shorten(figures, 100, placeholder=" ..."),
        ])  # fmt: skip
    Table("", HEADER, rows).show()
    other = sum(item.state is not State.CURRENT for item in results)
    print(f"{len(results)} runs in {directory}, {other} of them not current")
    return 0


def main(given: list[str] | None = None) -> int:
    options = plain_parser(__doc__.splitlines()[0])
    told = "a directory of results, or one file whose tables to print"
    options.add_argument("path", nargs="?", type=Path, default=RESULTS, help=told)
    told = "tables of one file as Markdown"
    options.add_argument("--markdown", action="store_true", help=told)
    args = options.parse_args(given)
    if not args.path.exists():
        options.error(f"{args.path}: no such file or directory")
    if args.path.is_file():
        return show_tables(args.path, args.markdown)
    return list_results(args.path)


if __name__ == "__main__":
    raise SystemExit(main())
