"""What `make test` tells: both halves' output, one line that counts both, and which tests are slow
without a reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PASSED = "===== 3 passed, 2 skipped, 1 deselected in 63.21s (0:01:03) ====="
FAILED = "===== 1 failed, 4 passed, 1 error in 0.12s ====="
BUSY = """
import pytest, time

def busy():
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass

def test_short(): pass

@pytest.mark.slow("it counts to a million")
def test_explained(): busy()

def test_unexplained(): busy()
"""
CONFTEST = """
from pathlib import Path
from tests.durations import Durations

def pytest_configure(config):
    config.pluginmanager.register(Durations(0.1, Path("durations")))
"""


@pytest.mark.parametrize(
    ("first", "beside", "code", "line"),
    [
        (PASSED, PASSED, 0, "6 passed, 0 failed, 4 skipped"),
        (PASSED, FAILED, 1, "7 passed, 2 failed, 2 skipped"),
        (FAILED, PASSED, 1, "7 passed, 2 failed, 2 skipped"),
        (PASSED, "Killed", 1, "3 passed, 0 failed, 2 skipped"),
    ],
)
def test_one_line_counts_both_halves(
    tmp_path: Path, first: str, beside: str, code: int, line: str
) -> None:
    python = tmp_path / "python"
    say = "\n".join(
        f"*{name}*) echo '{text}'; exit {int(text == FAILED)};;"
        for name, text in (("first", first), ("beside", beside))
    )
    python.write_text(f'#!/bin/sh\ncase "$*" in\n{say}\nesac\n')
    python.chmod(0o755)
    command = [ROOT / ".ci/test", python, "beside", "--", "first"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == line
    assert lines.index(first) <= 1
    assert beside in lines[2:]
    assert ("a half has ended without a summary" in done.stdout) == (beside == "Killed")


def test_a_slow_test_says_why_and_durations_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_busy.py").write_text(BUSY)
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore")
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", "test_busy.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    told = done.stdout.split("without a mark slow(why)")[1]
    assert "test_unexplained" in told
    assert "test_explained" not in told
    (record,) = (tmp_path / "durations").iterdir()
    names = list(json.loads(record.read_text()))
    assert {name.split("::")[1] for name in names[:2]} == {"test_explained", "test_unexplained"}
    assert names[2].endswith("test_short")
