"""Connection: one HTTP/1.1 connection that asks, and notes when what it was told came.

No event is read as JSON but the first ones and the last: a client that is slower than the server
would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from photon_ext.bench.asks import Ask, Endpoint
from photon_ext.errors import shortened

_INFORMS = 100, 102, 103  # the answer is to follow
_MOST_ERROR = 65536  # bytes of an error's body that are kept
_MOST_EVENT = 1 << 20  # bytes of an event
_MOST_TOKENS = 1 << 53


@dataclass
class Answer:
    """What came of a request. Times are seconds of `time.perf_counter`, which all processes of a
    machine share.

    Attributes:
        asked: tokens that it was to get.
        due, sent, ended: when it was to be sent, was, and was complete.
        times: when each event with text came. An event may have several tokens.
        tokens, prompt_tokens: as the server's usage says; None: it said none.
        error: why it failed; None: it did not.
    """

    asked: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d", ()))
    tokens: int | None = None
    prompt_tokens: int | None = None
    error: str | None = None


class Connection(asyncio.Protocol):
    """Asks one request after the other, as long as it is `usable`: not after a failure, nor where
    the server has closed it.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """`timeout_s`: of a whole answer."""
        self.usable = True
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer = Answer(0, 0.0)
        self._done: asyncio.Future[None] | None = None
        self._rest = b""
        self._now = 0.0
        self._told_end = False

    async def open(self) -> None:
        """Raises OSError. Where it is open, it does nothing."""
        if self._transport is not None:
            return
        to = urlsplit(self._endpoint.url)
        secure = ssl.create_default_context() if to.scheme == "https" else None
        port = to.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(lambda: self, to.hostname or "", port, ssl=secure)
        self._transport = made[0]

    async def ask(self, ask: Ask, due: float) -> Answer:
        """Sends it now; returns its answer, whole or failed."""
        answer = self._answer = Answer(ask.answer, due)
        self._done = asyncio.get_running_loop().create_future()
        self._parser, self._rest, self._told_end = httptools.HttpResponseParser(self), b"", False
        body = json.dumps(self._endpoint.body(ask)).encode()
        answer.sent = time.perf_counter()
        try:
            await asyncio.wait_for(self._exchange(self._head(body) + body), self._timeout_s)
        except asyncio.TimeoutError:
            answer.error = f"no whole answer within {self._timeout_s:g} s"
        except OSError as error:
            answer.error = f"cannot connect: {error.strerror or error}"
        answer.ended = answer.ended or time.perf_counter()
        if answer.error is not None:
            self.close()
        return answer

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    async def _exchange(self, request: bytes) -> None:
        await self.open()
        assert self._transport is not None
        assert self._done is not None
        self._transport.write(request)
        await self._done

    def _head(self, body: bytes) -> bytes:
        endpoint = self._endpoint
        lines = [
            f"POST {urlsplit(endpoint.url).path.rstrip('/')}{endpoint.path} HTTP/1.1",
            f"Host: {urlsplit(endpoint.url).netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if endpoint.api_key is not None:
            lines.append(f"Authorization: Bearer {endpoint.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()

    # --- what the transport and the parser call ---------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"this is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._told_end:  # a body without a length ends with its connection
            self._end()
        self._fail("the connection was closed before the end")

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + data)[:_MOST_ERROR]
            return
        text = (self._rest + data).replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._take(event[5:].strip())
        if len(self._rest) > _MOST_EVENT:
            self._fail(f"an event in the stream has more than {_MOST_EVENT} bytes")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status in _INFORMS:
            return
        if status != 200:
            self._fail(f"{status}: {_message(self._rest)}")
        elif not self._told_end and self._answer.error is None:
            self._fail("the stream ended without [DONE]")
        self.usable = self.usable and self._parser.should_keep_alive()
        self._end()

    def _take(self, event: bytes) -> None:
        """One event. Quotes within a text are escaped: those looked for here are JSON's own."""
        answer = self._answer
        if event == b"[DONE]":
            self._told_end = True
        elif answer.times and b'"completion_tokens"' not in event and b'"error"' not in event:
            answer.times.append(self._now)
        else:
            try:
                self._read(json.loads(event))
            except (ValueError, TypeError, AttributeError, RecursionError):
                self._fail(f"the server sends events of another shape: {_message(event)}")

    def _read(self, event: dict[str, Any]) -> None:
        answer, usage = self._answer, event.get("usage")
        if event.get("error"):
            self._fail(f"in the stream: {_message(json.dumps(event).encode())}")
        if usage:
            answer.tokens = _count(usage.get("completion_tokens"))
            answer.prompt_tokens = _count(usage.get("prompt_tokens"))
        for choice in event.get("choices") or ():
            delta = choice.get("delta", {"content": True}) or {}  # a completion's text is beside it
            if any(value for name, value in delta.items() if name != "role"):
                answer.times.append(self._now)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done() and self._answer.error is None:
            self._answer.error = why
            self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._answer.ended = self._now or time.perf_counter()
            self._done.set_result(None)


def _count(value: object) -> int | None:
    """Of tokens. ValueError: it is none."""
    if value is None or (type(value) is int and 0 <= value < _MOST_TOKENS):
        return value
    raise ValueError(value)


def _message(body: bytes) -> str:
    """Of an error's body, in OpenAI's shape or another."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)
        while isinstance(error, dict):
            error = error.get("error") or error.get("message") or error.get("detail") or text
    except (ValueError, RecursionError):
        error = text
    return shortened(" ".join(str(error).split()))
