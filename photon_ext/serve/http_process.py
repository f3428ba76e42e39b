"""An HTTP process: uvicorn on the socket that the parent has bound, around the ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.importer import import_from_string

from photon_ext.errors import describe
from photon_ext.serve.child import become_child, end_with, inherited
from photon_ext.serve.client import EngineClient
from photon_ext.serve.messages import TO_CHILD, BlockingFrames, Failed, Ready, Start, frame
from photon_ext.serve.settings import ServeSettings

KEEP_ALIVE_S = 75  # longer than the proxies in front keep a connection that is not used
LAST_WORDS_S = 0.8  # once the engine is gone: for errors of requests in flight, and for probes


def main() -> None:
    channel = become_child()
    link, listening = inherited(0), inherited(1)
    try:
        start = BlockingFrames(channel, TO_CHILD).receive()
    except EOFError:
        return
    assert isinstance(start, Start)
    channel.settimeout(None)
    end_with(channel)
    settings = msgspec.convert(start.settings, ServeSettings)

    def tell(message: Ready | Failed) -> None:
        channel.sendall(frame(message))

    try:
        uvloop.run(_serve(EngineClient(link), settings, listening, lambda: tell(Ready())))
    except Exception as error:
        tell(Failed(f"the HTTP server cannot go on: {describe(error)}"))
        raise


def serve_in_process(
    client: EngineClient,
    settings: ServeSettings,
    listening: socket.socket,
    on_started: Callable[[], object],
) -> None:
    """HTTP in this process, for an engine in this process."""
    uvloop.run(_serve(client, settings, listening, on_started))


async def _serve(
    client: EngineClient,
    settings: ServeSettings,
    listening: socket.socket,
    on_started: Callable[[], object],
) -> None:
    await client.connect()
    make_app = import_from_string(settings.app)
    server = HttpServer(make_app(client, settings), on_started)
    client.on_lost = server.end_soon
    await server.serve(sockets=[listening])
    client.on_lost = lambda: None
    await client.close()


class HttpServer(uvicorn.Server):
    """Ends by SIGTERM alone, when requests in flight have ended."""

    def __init__(self, app: Any, on_started: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end)
        yield

    def end_soon(self) -> None:
        """The engine is gone: requests in flight get an error, /health says so for a while, and
        then nobody waits for who does not read that.
        """
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    def _end(self) -> None:
        self.should_exit = True


if __name__ == "__main__":
    main()
