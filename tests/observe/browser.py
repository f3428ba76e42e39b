"""A headless Chromium with one page, driven by the Chrome DevTools protocol over a pipe.

Protocol: https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
PATIENCE = 120  # seconds
_FIRST = 100  # file descriptors from here on are nobody's


class Page:
    """Opens a file; a context manager. Answers are waited for; the process is killed at the end."""

    def __init__(self, file: Path, profile: Path) -> None:
        (child_in, commands), (answers, child_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, _FIRST) for end in (child_in, child_out)]

        def as_three_and_four() -> None:  # where the browser looks for them
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [str(PATH), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=as_three_and_four,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # A browser that hangs ends the test with "has ended".
        self._watch = threading.Timer(PATIENCE, self._process.kill)
        self._watch.start()
        for end in (child_in, child_out, *ends):
            os.close(end)
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb", 0)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")
        self.resize(1400)
        self.call("Page.navigate", url=file.as_uri())
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            time.sleep(0.02)
        self._frame()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *raised: object) -> None:
        self._watch.cancel()
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, what comes of it."""
        how = {"awaitPromise": True, "returnByValue": True}
        return self.call("Runtime.evaluate", expression=expression, **how)["result"].get("value")

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._frame()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real mouse event ("mouseMoved", "mouseWheel" ...), and then a frame."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self._frame()

    def click(self, x: float, y: float, count: int = 1) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=count)

    def _frame(self) -> None:
        frame = "requestAnimationFrame(() => setTimeout(done))"
        self.evaluate(f"new Promise(done => setTimeout(() => {frame}, 30))")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._answers.fileno(), 1 << 16)
            if not read:
                raise RuntimeError(f"the browser has ended, exit code {self._process.wait()}")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
