"""Result files: a line of JSON per run, rewritten after every entry so a crash loses nothing."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.environment import environment
from benchmarks.common.progress import Progress

SCHEMA = 2
DEVICE_LOST = (
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    "misaligned address",
)


class BenchmarkError(Exception):
    """A result is wrong, so its time means nothing."""


class ResultFile:
    """What one run of a benchmark found: a line of a file that other runs may share. It takes the
    place of an earlier run of that benchmark on that device whose arguments were the same.

    Args:
        benchmark: the module's name, "decode".
        arguments: how it was called.
        path: where the line goes; None keeps it in memory. ValueError names a file that is there
            and holds something else.
    """

    def __init__(self, benchmark: str, arguments: Namespace, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.lost = False
        self.progress = Progress()
        self.entries: list[dict[str, Any]] = []
        given = {name: value for name, value in vars(arguments).items() if name != "json"}
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "arguments": _plain(given),
            "environment": environment(),
            "entries": self.entries,
        }
        there = read_runs(self.path) if self.path is not None and self.path.exists() else []
        self._others = "".join(_line(run) for run in there if not _same(run, self.data))
        load, cores = self.data["environment"]["load"], self.data["environment"]["cores"] or 1
        if load > 0.75 * cores:
            print(
                f"warning: {load:.1f} processes ran on {cores} cores in the last minute; "
                "times on the host mean little",
                flush=True,
            )
        self._write()

    def set(self, **values: Any) -> None:
        """Adds facts that hold for the whole run."""
        self.data.update(values)
        self._write()

    def measure(
        self, labels: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Adds one entry: `labels` with what `measure` returns, or with why it failed.

        Returns it as the file has it, or None if it failed. After an error that leaves the CUDA
        context unusable the remaining entries are marked as skipped instead of tried.
        """
        if self.lost:
            reason = "skipped: an earlier entry left the CUDA device unusable; run this one alone"
            return self._failed(labels, reason, "")
        shown = (f"{name} {value}" for name, value in labels.items() if not isinstance(value, dict))
        self.progress.show(f"{self.data['benchmark']}: {', '.join(shown)}")
        start = time.perf_counter()
        try:
            measured = measure()
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip()
            self.lost = any(text in message for text in DEVICE_LOST)
            trace = "" if _explained(error) else traceback.format_exc(limit=-4)
            return self._failed(labels, message.splitlines()[0], trace)
        finally:
            self.progress.clear()
        seconds = time.perf_counter() - start
        return self.add({**labels, "status": "ok", **measured, "seconds": seconds})

    def add(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Adds what was measured, and returns it as the file has it: rounded once, so that a table
        of the file is the table that was printed.
        """
        plain: dict[str, Any] = _plain(entry)
        self.entries.append(plain)
        self._write()
        return plain

    def absent(self, labels: dict[str, Any], status: str, reason: str) -> None:
        """Adds an entry for what was not measured and is no failure: "missing" or "skipped"."""
        self.entries.append({**labels, "status": status, "reason": reason})
        self._write()

    @property
    def failed(self) -> bool:
        """Whether an entry has failed."""
        return any(entry["status"] == "failed" for entry in self.entries)

    def _failed(self, labels: dict[str, Any], error: str, trace: str) -> None:
        print(f"failed: {labels}: {error}\n{trace}".rstrip(), flush=True)
        self.entries.append({**labels, "status": "failed", "error": error, "trace": trace})
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(self._others + _line(self.data))
        os.replace(partial, self.path)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs that ResultFiles wrote, as they stand. Raises ValueError, which names the file, for
    anything else."""
    try:
        runs = [json.loads(line) for line in path.read_text().splitlines()]
        for run in runs:
            if missing := {"entries", "environment", "benchmark"} - set(run):
                raise KeyError(", ".join(sorted(missing)))
            entries, found = run["entries"], run["environment"]
            if not all(isinstance(entry, dict) for entry in entries) or not isinstance(found, dict):
                raise TypeError("entries and environment are not objects")
    except (OSError, KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a result file of benchmarks ({told})") from error
    return runs


def _line(run: dict[str, Any]) -> str:
    return json.dumps(_plain(run), separators=(",", ":"), allow_nan=False) + "\n"


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether both have measured the same. Options come and go: those that both know count."""
    before, after = old.get("arguments", {}), new["arguments"]
    shared = before.keys() & after.keys()
    alike = shared and all(before[name] == after[name] for name in shared)
    return bool(alike) and _subject(old) == _subject(new)


def _subject(run: dict[str, Any]) -> tuple[str, str | None]:
    """A benchmark and its device."""
    found = run["environment"]
    return run["benchmark"], found.get("gpu") or found.get("cpu")


def _explained(error: Exception) -> bool:
    """Whether it says itself what is wrong and what to do. By name: peers run where photon_ext
    cannot be imported."""
    named = any(base.__name__ == "PhotonError" for base in type(error).__mro__)
    return named or isinstance(error, BenchmarkError)


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: floats keep 6 significant digits, not finite ones are None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
