"""What has been measured, and which results are stale: made from other sources than the present tree's.

python -m benchmarks.report [DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.env import REPOSITORY, source_digest
from benchmarks.common.table import print_table

RESULTS = Path(__file__).resolve().parent / "results"


class State(Enum):
    """Whether a result tells about the present sources."""

    CURRENT = "current"
    STALE = "stale"
    UNREADABLE = "unreadable"


class Listed(NamedTuple):
    """One result file."""

    path: Path
    state: State
    data: dict[str, Any]


def read_results(directory: Path, digest: str) -> list[Listed]:
    """Every .json under `directory`, oldest first; a file that is no result is listed as unreadable."""
    listed = [_read(path, digest) for path in sorted(directory.rglob("*.json"))]
    return sorted(listed, key=lambda item: str(item.data.get("started", "")))


def _read(path: Path, digest: str) -> Listed:
    try:
        data = json.loads(path.read_text())
        sources = data["environment"]["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        return Listed(path, State.UNREADABLE, {})
    return Listed(path, State.CURRENT if sources == digest else State.STALE, data)


def headline(data: dict[str, Any]) -> str:
    """The figures of one result in a line."""
    entries = [entry for entry in data.get("entries", ()) if entry.get("status") == "ok"]
    parts = []
    for entry in entries:
        fast = " fast" if entry.get("kernels") == "fast" else ""
        if entry.get("what") == "decode":
            parts.append(f"{entry['model']} B{entry['batch']} d{entry['depth']}{fast} {entry['ms_per_step']['median']:.3g} ms")
        elif entry.get("what") == "counts":
            parts.append(f"{entry['model']} B{entry['batch']} {entry['way']} {'pass' if entry['passed'] else 'FAIL'}")
        elif entry.get("what") == "single stream":
            parts += [f"{label} {own['tokens_per_s']:.3g} tok/s" for label, own in entry["rates"].items()]
        elif entry.get("what") == "steps":
            parts.append(f"{entry['loop']} {entry['stage']}{fast} {entry['ms_per_step']:.3g} ms")
        elif entry.get("what") == "gain":
            parts.append(f"{entry['model']} x{entry['streams']} {entry['observed']:+.1%} (predicted {entry['predicted']:+.1%})")
        elif entry.get("what") == "peer":
            parts.append(f"{entry['peer']} B{entry['batch']} {entry['ms_per_step']:.3g} ms")
        elif entry.get("what") == "layers":
            parts.append(f"{entry['model']} B{entry['batch']} {entry['way']} {entry['share']:.0%}")
        elif "bytes_per_s" in entry and len(entries) == 1:
            parts.append(f"{entry['bytes_per_s'] / 1e9:.0f} GB/s")
    return ", ".join(parts)


def main(given: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("directory", nargs="?", type=Path, default=RESULTS)
    args = options.parse_args(given)
    results = read_results(args.directory, source_digest(REPOSITORY))
    rows = []
    for path, state, data in results:
        environment = data.get("environment", {})
        entries = data.get("entries", [])
        statuses = [entry.get("status") for entry in entries]
        failed = statuses.count("failed")
        rows.append([
            path.relative_to(args.directory).as_posix(), data.get("benchmark", "?"), data.get("started", "?"),
            environment.get("gpu") or environment.get("cpu") or "?", (environment.get("commit") or "?")[:10], f"{statuses.count('ok')}",
            f"{failed}", state.value, headline(data)[:100],
        ])  # fmt: skip
    if rows:
        print_table(("file", "benchmark", "started", "on", "commit", "ok", "failed", "state", "figures"), rows)
    stale = sum(item.state is not State.CURRENT for item in results)
    print(f"{len(results)} results in {args.directory}, {stale} of them stale or unreadable")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
