"""uvicorn's HTTP over httptools, with bounds on what comes before an application sees a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MOST_HEAD_BYTES = 2**16  # of the request line and headers; of what follows a body, or part of it
HEAD_S = 30.0  # in which they have to be complete
_MESSAGE = b"the request line and headers, or trailers, have more than %d bytes; send less" % (
    MOST_HEAD_BYTES
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%s" % (len(_MESSAGE), _MESSAGE)
)


class BoundedHttp(HttpToolsProtocol):
    """One connection. A head that is too large is answered with 431, and so are trailers, which the
    parser keeps; a head that takes too long is answered with nothing. Then the connection is
    closed. Requests may be sent before earlier ones are answered: what is no HTTP is refused behind
    their answers, and all hear of a client that leaves, where uvicorn tells the last one alone.
    """

    _bare_bytes = 0  # that have come since a head was complete, or a byte of a body came
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request that is answered now, or was last
    _broken: str | None = None  # what is said behind the answers that are still due

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._refused or self._broken is not None:
            return
        self._bare_bytes += len(data)
        super().data_received(data)
        if self._bare_bytes > MOST_HEAD_BYTES and not self._refused:
            self._refuse()

    def on_message_begin(self) -> None:
        if self._head_timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._bare_bytes = 0
        self._forget_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            self._refuse()
        elif not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        running, broken = self._running, self.cycle
        if running is None or running.response_complete or (running is broken and broken.more_body):
            super().send_400_response(msg)
            return
        self._broken = msg
        if broken.more_body:  # its body is what is no HTTP: it waits, and is never begun
            self.pipeline.popleft()

    def on_response_complete(self) -> None:
        if self._broken is not None and not self.pipeline and not self.transport.is_closing():
            super().send_400_response(self._broken)
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self) -> None:
        self._refused = True
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
