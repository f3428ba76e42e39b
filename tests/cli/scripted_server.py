"""A server that answers byte for byte as a test has it, and a terminal for a command."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cli.command import ROOT, environment

EVENTS = {"Content-Type": "text/event-stream"}


@dataclass
class Reply:
    """
    Attributes:
        parts: of the body, each sent by itself.
        breaks: the connection ends without the end of the body.
    """

    parts: Iterable[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: EVENTS)
    breaks: bool = False


@dataclass
class Scripted:
    """
    Attributes:
        replies: to requests but those for the models, in turn.
        asked: their bodies. keys: their Authorization, those for models included.
        left: a client was gone before its answer had ended.
    """

    replies: list[Reply]
    address: str = ""
    asked: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


def said(*texts: str, end: bool = True) -> list[bytes]:
    """Events of an answer, with text as UTF-8."""
    deltas = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    last = [{"choices": [{"delta": {}, "finish_reason": "stop"}]}] if end else []
    lines = [f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in (*deltas, *last)]
    return [line.encode() for line in (*lines, *(["data: [DONE]\n\n"] if end else []))]


@contextmanager
def scripted(*replies: Reply, models: Reply | None = None) -> Iterator[Scripted]:
    """A server on a free port."""
    script = Scripted([*replies])
    listed = models or Reply([b'{"data": [{"id": "first"}, {"id": "second"}]}'], headers={})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            script.keys.append(self.headers["Authorization"])
            self._reply(listed)

        def do_POST(self) -> None:
            script.keys.append(self.headers["Authorization"])
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply(script.replies.pop(0))

        def _reply(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Transfer-Encoding": "chunked"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            try:
                for part in reply.parts:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                if not reply.breaks:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                script.left.set()

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Terminal:
    """A command in a terminal of its own.

    Attributes:
        screen: all that it has written, without the terminal's own codes.
    """

    def __init__(self, path: Path, *arguments: str) -> None:
        """`path`: where modules are looked for first."""
        primary, secondary = pty.openpty()
        self._primary = primary
        self.process = subprocess.Popen(
            [sys.executable, "-m", "photon_ext", *arguments],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal there
            env=environment(TERM="xterm", PYTHONPATH=os.pathsep.join([str(path), str(ROOT)])),
        )
        os.close(secondary)
        self.raw = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._primary)

    def type(self, text: str) -> None:
        os.write(self._primary, text.encode())

    def shows(self, text: str) -> None:
        """Waits for it."""
        self._read_until(lambda: text in self.screen)

    def asks(self) -> None:
        """Waits until it shows a prompt, behind which nothing stands."""
        self._read_until(lambda: self.screen.endswith("> "))

    def _read_until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            left = end - time.monotonic()
            assert left > 0, f"not within 60 s: {self.screen!r}"
            if select.select([self._primary], [], [], left)[0]:
                self.raw += os.read(self._primary, 4096)  # OSError: the command has ended

    @property
    def screen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw.decode(errors="replace"))
