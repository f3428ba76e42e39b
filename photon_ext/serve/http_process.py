"""An HTTP process: uvicorn on the socket that the parent has bound, around the ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from photon_ext.serve.contract import EngineGone
from photon_ext.serve.http_protocol import BoundedHttp
from photon_ext.serve.messages import TO_CHILD, BlockingFrames, Failed, Ready, Start, frame
from photon_ext.serve.settings import ServeSettings

KEEP_ALIVE_S = 75  # longer than the proxies in front keep a connection that is not used
LOOKS_EACH_S = 0.02
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
    logging.basicConfig(format=f"photon-ext http {settings.worker}: %(message)s")

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
    on_ready: Callable[[], object],
) -> None:
    """HTTP in this process, for an engine in this process."""
    uvloop.run(_serve(client, settings, listening, on_ready))


async def _serve(
    client: EngineClient,
    settings: ServeSettings,
    listening: socket.socket,
    on_ready: Callable[[], object],
) -> None:
    client.frozen_s = settings.engine_timeout
    await client.connect()
    if settings.access_log:
        _log_access()
    app = import_from_string(settings.app)(client, settings)
    server = HttpServer(app)
    client.on_lost = server.end_soon
    waits = asyncio.ensure_future(_until_ready(client, app, on_ready))
    await server.serve(sockets=[listening])
    waits.cancel()
    client.on_lost = lambda: None
    await client.close()


def _log_access() -> None:
    """One line for each request, as the application writes it."""
    log, lines = logging.getLogger("photon_ext.access"), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


async def _until_ready(client: EngineClient, app: Any, on_ready: Callable[[], object]) -> None:
    """Calls `on_ready` once requests are served; before, they are answered by 503. An application
    may have a function `ready` that says so.
    """
    with contextlib.suppress(EngineGone):
        await client.ready()
        while not getattr(app, "ready", lambda: True)():
            await asyncio.sleep(LOOKS_EACH_S)
        on_ready()


class HttpServer(uvicorn.Server):
    """Ends by SIGTERM alone, when requests in flight have ended."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

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
