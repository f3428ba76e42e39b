"""Runs an engine's worker as a process, and keeps what it said, however it ended.

A peer may need an interpreter of its own, which multiprocessing cannot cross: hence a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.environment import REPOSITORY
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.peer import MARK, Prompts, Setup

Said = dict[str, Any]


@dataclass
class Report:
    """What a worker said.

    Attributes:
        loaded: version, mode, method and load_s of the engine; None: it did not get so far.
        batches: a line per batch. failure: why it ended early, or None.
    """

    loaded: Said | None = None
    batches: dict[int, Said] = field(default_factory=dict)
    failure: str | None = None

    def of(self, batch: int) -> Said:
        """What was measured for a batch. Raises BenchmarkError, with why, where nothing was."""
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
    heard: Callable[[Report, int], None] = lambda report, batch: None,
) -> Report:
    """Runs the worker of a peer for up to `timeout` seconds.

    `batches` are the prompts of each batch, which is known by its size. `heard` is called with
    each batch that got its line. `python`: another interpreter.
    """
    report = Report()

    def hear(said: Said) -> None:
        if "loaded" in said:
            report.loaded = said["loaded"]
        else:
            report.batches[said["batch"]] = said
            heard(report, said["batch"])

    task = json.dumps({"peer": peer, "setup": setup._asdict(), "prompts": batches})
    report.failure = run_module("benchmarks.engines.worker", [], timeout, task, python, hear)
    return report


def run_module(
    module: str,
    arguments: list[str],
    timeout: float,
    given: str = "",
    python: str | None = None,
    hear: Callable[[Said], None] = lambda said: None,
) -> str | None:
    """`python -m module arguments` with `given` on stdin; why it failed, or None.

    Its whole process group ends with it. `hear` is called with each line that begins with MARK.
    """
    paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
    process = subprocess.Popen(
        [python or sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()
    watcher = threading.Thread(target=_end_in_time, args=(process, timeout, late), daemon=True)
    watcher.start()
    assert process.stdin is not None
    assert process.stdout is not None
    last = "nothing"
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(given)
        for line in process.stdout:
            if line.startswith(MARK):
                hear(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                last = line.strip()[:400]
    finally:
        _end_group(process)
        watcher.join()
        process.stdout.close()
    if late.is_set():
        return f"still running after {timeout:.0f} s; last words: {last}"
    return None if process.returncode == 0 else f"exit status {process.returncode}: {last}"


def _end_in_time(process: subprocess.Popen[str], timeout: float, late: threading.Event) -> None:
    """Ends what a process has started once it is over, and the process itself if it is late."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        late.set()
    _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
