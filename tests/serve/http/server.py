"""The app, reached without a socket, or by one where bytes on the wire matter."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import uvicorn

from photon_ext.serve.app import make_app
from photon_ext.serve.contract import End
from photon_ext.serve.http_protocol import BoundedHttp
from photon_ext.serve.settings import ServeSettings
from tests.serve.http.stub import Script, StubClient
from tests.serve.http.words import ids_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def says(text: str, end: End | None = None, stops: bool = True, **script: Any) -> Script:
    """Answers with this text, and the end token behind it."""
    tokens = ids_of(text + ("<|im_end|>" if stops else ""))
    return Script(lambda ask, index: tokens, end, **script)


def each_says(*texts: str, **script: Any) -> Script:
    """The i-th answer is the i-th text."""
    return Script(lambda ask, index: ids_of(texts[index] + "<|im_end|>"), **script)


def settings(model_dir: Path, **changes: Any) -> ServeSettings:
    given = {"model": "stub", "path": str(model_dir), "served_names": ("stub", "alias")}
    return ServeSettings(**{**given, **changes})


@asynccontextmanager
async def served(
    client: StubClient, model_dir: Path, **changes: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the app, which is ready. An app is made once for all that ask for the same: most
    of the time of a test would go into that.
    """
    given = settings(model_dir, **changes)
    switch, app = _APPS.setdefault(given, _made(given))
    switch.client = client
    async with AsyncExitStack() as stack:
        if not switch.loaded:
            await stack.enter_async_context(running(app))
        transport = httpx2.ASGITransport(app=app)
        http = httpx2.AsyncClient(transport=transport, base_url="http://stub")
        await stack.enter_async_context(http)
        while client.state == "ready" and (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.005)
        switch.loaded = client.state == "ready"
        yield http


class Switch:
    """The engine of an app, which is that of the test that runs."""

    def __init__(self) -> None:
        self.client: StubClient | None = None
        self.loaded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


_APPS: dict[ServeSettings, tuple[Switch, Any]] = {}


def _made(given: ServeSettings) -> tuple[Switch, Any]:
    if given in _APPS:
        return _APPS[given]
    switch = Switch()
    return switch, make_app(switch, given)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[None]:
    """The app's lifespan."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    started = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        started.set()

    task = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, events.get, send))
    events.put_nowait({"type": "lifespan.startup"})
    await started.wait()
    try:
        yield
    finally:
        events.put_nowait({"type": "lifespan.shutdown"})
        await task


def post(
    client: StubClient, model_dir: Path, path: str, body: Any, **changes: Any
) -> httpx2.Response:
    """One request, from where there is no event loop."""

    async def asked() -> httpx2.Response:
        async with served(client, model_dir, **changes) as http:
            return await http.post(path, json=body)

    return asyncio.run(asked())


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it has to."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_of_events(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """What one answer of a chat says."""
    choices = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(each["delta"].get("content") or "" for each in choices)


@contextmanager
def on_a_port(client: StubClient, model_dir: Path, **changes: Any) -> Iterator[str]:
    """The app on uvicorn, on another thread; yields its address."""
    given = settings(model_dir, **changes)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        made = make_app(client, given)
        config = uvicorn.Config(made, http=BoundedHttp, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            with httpx2.Client(base_url=address, timeout=60) as http:
                while not server.started or http.get("/ready").status_code != 200:
                    time.sleep(0.005)
            yield address
        finally:
            server.should_exit = True
            thread.join()
