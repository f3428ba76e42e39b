"""Runs an engine's worker as a process, and reads what it reported, however it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.env import REPOSITORY
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.peer import Prompts, Setup

POLL_SECONDS = 0.5


class Report(NamedTuple):
    """What a worker said: `loaded` as in worker.run (None: it did not get so far), a line per
    batch, and why it ended early, or None.
    """

    loaded: dict[str, Any] | None
    batches: dict[int, dict[str, Any]]
    failure: str | None

    def of(self, batch: int) -> dict[str, Any]:
        """What was measured for a batch.

        Raises BenchmarkError with the reason where nothing was.
        """
        line = self.batches.get(batch)
        if line is None:
            raise BenchmarkError(
                self.failure or "the process ended without a word about this batch"
            )
        if "error" in line:
            raise BenchmarkError(line["error"])
        return line


def run_worker(
    peer: str,
    setup: Setup,
    batches: list[Prompts],
    timeout: float,
    python: str | None = None,
    heard: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Starts the worker (with another interpreter if `python` names one), waits up to `timeout`
    seconds, and ends what it has started.

    `batches` are the prompts of each batch; a batch is known by its size. `heard` is called
    whenever a batch has got its line, with all that was said so far.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, task, log = (Path(folder) / name for name in ("report.jsonl", "task.json", "log.txt"))
        values = {"peer": peer, "setup": setup._asdict(), "prompts": batches, "report": str(path)}
        task.write_text(json.dumps(values))
        said = 0

        def listen() -> None:
            nonlocal said
            report = _read(path, None)
            if len(report.batches) > said:
                said = len(report.batches)
                heard(report)

        failure = run_module("benchmarks.engines.worker", [str(task)], log, timeout, python, listen)
        return _read(path, failure)


def _read(path: Path, failure: str | None) -> Report:
    """A report as far as it is written; a line that is not whole yet is left out."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    loaded = next((line["loaded"] for line in lines if "loaded" in line), None)
    return Report(loaded, {line["batch"]: line for line in lines if "batch" in line}, failure)


def run_module(
    module: str,
    arguments: list[str],
    log: Path,
    timeout: float,
    python: str | None = None,
    listen: Callable[[], None] = lambda: None,
) -> str | None:
    """`python -m module arguments` with its output in `log`; why it failed, or None. Its whole
    process group ends with it.

    `listen` is called now and then while it runs.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        ),
    }
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
            code = _wait(process, time.monotonic() + timeout, listen)
        finally:
            end_group(process)
    if code is None:
        return f"still running after {timeout:.0f} s; last words: {last_line(log)}"
    return None if code == 0 else f"exit status {code}: {last_line(log)}"


def _wait(process: subprocess.Popen[bytes], end: float, listen: Callable[[], None]) -> int | None:
    """The exit status; None where the process still runs at `end`."""
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
        listen()
    return None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "nothing"
