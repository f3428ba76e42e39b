"""Runs an engine's worker as a process, and reads what it reported, however it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.env import REPOSITORY
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.peer import Prompts, Setup


class Report(NamedTuple):
    """What a worker said: `loaded` as in worker.run (None: it did not get so far), a line per batch, and why it ended early, or None."""

    loaded: dict[str, Any] | None
    batches: dict[int, dict[str, Any]]
    failure: str | None

    def of(self, batch: int) -> dict[str, Any]:
        """What was measured for a batch. Raises BenchmarkError with the reason where nothing was."""
        line = self.batches.get(batch)
        if line is None:
            raise BenchmarkError(self.failure or "the process ended without a word about this batch")
        if "error" in line:
            raise BenchmarkError(line["error"])
        return line


def run_worker(peer: str, setup: Setup, batches: list[Prompts], timeout: float, python: str | None = None) -> Report:
    """Starts the worker (with another interpreter if `python` names one), waits up to `timeout` seconds, and ends what it has started.

    `batches` are the prompts of each batch; a batch is known by its size.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, task, log = (Path(folder) / name for name in ("report.jsonl", "task.json", "log.txt"))
        values = {"peer": peer, "setup": setup._asdict(), "prompts": batches, "report": str(report)}
        task.write_text(json.dumps(values))
        failure = run_module("benchmarks.engines.worker", [str(task)], log, timeout, python)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    loaded = next((line["loaded"] for line in lines if "loaded" in line), None)
    return Report(loaded, {line["batch"]: line for line in lines if "batch" in line}, failure)


def run_module(module: str, arguments: list[str], log: Path, timeout: float, python: str | None = None) -> str | None:
    """`python -m module arguments` with its output in `log`; why it failed, or None. Its whole process group ends with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))}
    with log.open("w") as output:
        process = subprocess.Popen(
            [python or sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"still running after {timeout:.0f} s; last words: {last_line(log)}"
        finally:
            end_group(process)
    return None if code == 0 else f"exit status {code}: {last_line(log)}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "nothing"
