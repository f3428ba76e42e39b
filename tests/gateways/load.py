"""Requests to a gateway's port: streams that are read, and short ones without end."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

PATH = "/v1/completions"
ASKED = {"model": "tiny", "prompt": "Hi", "ignore_eos": True}
LONG = 3000  # tokens


def post(port: int, path: str = PATH, **fields: Any) -> HTTPResponse:
    """ASKED and these fields; a field that is None is left out."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    body = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


def is_served(port: int, path: str = "/v1/models") -> bool:
    """Whether a port answers, and knows the model."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return b'"tiny"' in connection.getresponse().read()
    except (OSError, HTTPException):
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Stream:
    """An answer of LONG tokens, of which the first has come.

    Attributes:
        worker: who answers, where the gateway says so.
    """

    def __init__(self, port: int) -> None:
        options = {"include_usage": True}
        self.response = post(port, max_tokens=LONG, stream=True, stream_options=options)
        assert self.response.status == 200, self.response.read()
        self.worker = self.response.headers.get("x-smg-routed-worker-id")
        self.first = self.response.readline()
        assert self.first.startswith(b"data: {"), self.first

    def is_whole(self) -> bool:
        """Reads on to the end: whether all tokens have come. One that is broken off is not."""
        lines = [self.first]
        with suppress(OSError, HTTPException):
            lines += list(self.response)
        events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        if events[-1] != b"[DONE]":
            return False
        last = json.loads(events[-2])
        return bool(last.get("usage") and last["usage"]["completion_tokens"] == LONG)

    def leave(self) -> None:
        self.response.close()


class Load:
    """Requests on a few threads, one after the other, until the block is left.

    Attributes:
        told: 200 for each whole answer, or what came instead, or how its connection broke.
    """

    def __init__(self, port: int, threads: int = 3, tokens: int = 5) -> None:
        self.told: list[int | str] = []
        self._port, self._tokens = port, tokens
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                response = post(self._port, max_tokens=self._tokens)
                told = json.loads(response.read())
                ok = response.status == 200
                whole = ok and told["usage"]["completion_tokens"] == self._tokens
                self.told.append(200 if whole else str(told))
            except (OSError, HTTPException, ValueError) as error:
                self.told.append(repr(error))

    @property
    def failed(self) -> list[int | str]:
        return [told for told in self.told if told != 200]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
