"""How long each test takes: recorded in build/durations, and a test of more than ten seconds says
why, by the mark `slow`. One that does not is named; from thirty seconds on it fails the session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

MOST_S = 10.0
FAILS_AT = 3  # times that: a machine may be half as fast as another, or as an hour ago
FOLDER = Path(__file__).resolve().parents[1] / "build/durations"


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Durations:
    """A pytest plugin. Only a test that takes more than `most_s` both by the clock and of CPU time
    is too long: on a loaded machine every test waits for its turn.
    """

    def __init__(self, most_s: float = MOST_S, folder: Path = FOLDER) -> None:
        self.most_s = most_s
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.unexplained: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Times the test alone: fixtures that several share would count for the first."""
        began, used = time.monotonic(), _cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - began
            self.seconds[item.nodeid] = round(seconds, 3)
            mark = item.get_closest_marker("slow")
            if min(seconds, _cpu_seconds() - used) > self.most_s and not (mark and mark.args):
                self.unexplained[item.nodeid] = seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the record, the longest first; a long unexplained test fails the session."""
        if not self.seconds:
            return
        longest = sorted(self.seconds.items(), key=lambda one: -one[1])
        self.folder.mkdir(parents=True, exist_ok=True)
        first = next(iter(self.seconds)).split("::")[0].replace("/", "-")
        (self.folder / f"{first}.json").write_text(json.dumps(dict(longest), indent=0))
        is_long = max(self.unexplained.values(), default=0.0) > FAILS_AT * self.most_s
        if is_long and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the tests that do not say why they are slow."""
        if self.unexplained:
            terminalreporter.section(f"over {self.most_s:.0f} s without a mark slow(why)")
            for name, seconds in self.unexplained.items():
                terminalreporter.line(f"{seconds:.0f} s  {name}")
