"""`photon-ext serve` as a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTS_WITHIN_S = 120.0
LONG: dict[str, Any] = {"max_new_tokens": 4000, "ignore_eos": True}
APP = "tests.serve.stub_app:make_app"


class Server:
    """Started with the application of stub_app.py, or the server's own.

    Attributes:
        process: the parent. port: where it serves.
        log: what it has written, in lines.
    """

    def __init__(
        self, model: str, *arguments: str, app: str | None = APP, python: str = sys.executable
    ) -> None:
        """`app`: None is the server's own. `python`: the one that has photon_ext."""
        line = [python, "-m", "photon_ext", "serve", "--model", model, "--port", "0"]
        line += [] if app is None else ["--app", app]
        self.process = subprocess.Popen(
            [*line, "--device", "cpu", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())

    def __enter__(self) -> Server:
        try:
            self.port = int(self.said(r"ready in .* at http://127.0.0.1:(\d+)")[1])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def said(self, pattern: str, seconds: float = STARTS_WITHIN_S) -> re.Match[str]:
        """Waits for a line of its log."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            is_whole = not self._reader.is_alive()  # before the look at what it has read
            found[:] = filter(None, (re.search(pattern, line) for line in [*self.log]))
            return bool(found) or is_whole

        until(look, seconds, lambda: f"no line has {pattern!r}: {self.log}")
        assert found, f"it has ended: {self.log}"
        return found[0]

    def children(self, module: str) -> list[int]:
        """Process ids of its children that run this module of photon_ext.serve."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                line = (path / "cmdline").read_text()
                if parent == self.process.pid and f"photon_ext.serve.{module}\0" in line:
                    found.append(int(path.name))
        return found

    def ended(self, seconds: float) -> int:
        """Its exit code; waits for it."""
        return self.process.wait(seconds)

    def get(self, path: str) -> tuple[int, Any]:
        response = self._ask("GET", path)
        return response.status, json.loads(response.read())

    def post(self, **asked: Any) -> HTTPResponse:
        """The response to a request for tokens; its lines come as they are read."""
        return self._ask("POST", "/generate", json.dumps(asked))

    def generated(self, **asked: Any) -> list[Any]:
        """All lines of such a response."""
        response = self.post(**asked)
        assert response.status == 200, response.read()
        return [*lines(response)]

    def _ask(self, method: str, path: str, body: str | None = None) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body)
        return connection.getresponse()

    def is_empty(self) -> bool:
        """Whether nothing runs or waits, and no row or page is held."""
        stats = self.get("/stats")[1]
        held = ("live", "waiting", "rows_held", "pages_held", "automata_held")
        return not any(stats[name] for name in held)


def lines(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        yield json.loads(line)


def tokens_of(told: list[Any], index: int = 0) -> list[int]:
    return [
        token for deltas in told for one, tokens, _ in deltas if one == index for token in tokens
    ]


def end_of(told: list[Any], index: int = 0) -> list[Any]:
    """Finish reason, stop reason and error."""
    (end,) = [end for deltas in told for one, _, end in deltas if one == index and end is not None]
    return end  # type: ignore[no-any-return]


def until(
    true: Callable[[], object], seconds: float = 30.0, what: Callable[[], str] = lambda: ""
) -> None:
    """Waits until something is true; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what() or f"not within {seconds} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Stream:
    """A long answer that is being read, over a connection whose HTTP process is known."""

    def __init__(self, server: Server, begins: bool = True) -> None:
        """`begins`: False: it is asked for later."""
        self.connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.connection.request("GET", "/health")
        self.pid = int(json.loads(self.connection.getresponse().read())["pid"])
        if begins:
            self.begin()

    def begin(self, n: int = 1) -> None:
        """Asks for `n` answers, and waits for the first tokens."""
        asked = {"ids": [1], "n": n, "params": {**LONG, "temperature": 1.0}}
        self.connection.request("POST", "/generate", json.dumps(asked))
        self.response = self.connection.getresponse()
        self.first = next(lines(self.response))

    def rest(self) -> list[Any]:
        """What follows; raises where the connection breaks."""
        return [*lines(self.response)]

    def leave(self) -> None:
        self.connection.close()
        self.response.close()
