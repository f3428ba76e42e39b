"""The line that says how far a loader is: on a terminal, after a while, and gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

from photon_ext.models.loading import progress
from photon_ext.models.loading.progress import counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_second_a_look(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> io.StringIO:
    """`stderr` in the place of its own, where a second passes with each look at the clock."""
    seconds = iter(range(100))
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(seconds)))
    return stderr


def test_what_takes_long_is_counted_and_the_line_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = a_second_a_look(monkeypatch, Terminal())
    assert list(counted("abcd", "loading")) == list("abcd")
    lines = stderr.getvalue().split("\r")
    assert lines == ["", "loading: 1 of 4", "loading: 2 of 4", "loading: 3 of 4", " " * 15, ""]


def test_the_line_is_gone_where_the_loop_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def divide() -> None:
        for item in counted([2, 1, 0, 3], "loading"):
            assert 2 / item

    stderr = a_second_a_look(monkeypatch, Terminal())
    with pytest.raises(ZeroDivisionError):
        divide()
    assert stderr.getvalue().endswith(f"loading: 2 of 4\r{' ' * 15}\r")


def test_what_is_done_soon_or_read_by_nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = a_second_a_look(monkeypatch, Terminal())
    assert list(counted("a", "loading")) == ["a"]
    assert stderr.getvalue() == ""
    stderr = a_second_a_look(monkeypatch, io.StringIO())
    assert list(counted(range(50), "loading")) == list(range(50))
    assert stderr.getvalue() == ""
