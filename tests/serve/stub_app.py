"""An ASGI application that shows what an engine client says, as JSON: for tests of processes."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from photon_ext.serve import Ask, BadAsk, Busy, Client, EngineGone, EngineStarting, ServeSettings

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
STATUS = {BadAsk: 400, Busy: 429, EngineGone: 503, EngineStarting: 503}


def make_app(client: Client, settings: ServeSettings) -> Any:
    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["path"] == "/health":
            health = client.health()
            await _reply(send, 200 if health.ok else 503, {**asdict(health), "pid": os.getpid()})
        elif scope["path"] == "/stats":
            await _reply(send, 200, await client.stats())
        elif scope["path"] == "/generate":
            await _generate(client, await _body(receive), send)

    return app


async def _generate(client: Client, asked: dict[str, Any], send: Send) -> None:
    """One line of JSON for each list of deltas; the last is the error, if there is one."""
    try:
        generation = await client.generate(Ask(ids=tuple(asked.pop("ids")), **asked))
    except (BadAsk, Busy, EngineGone, EngineStarting) as error:
        told = {"error": str(error), "param": getattr(error, "param", None)}
        await _reply(send, STATUS[type(error)], told)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    async with generation:
        try:
            async for deltas in generation:
                lines = [[one.index, one.tokens, one.end] for one in deltas]
                await _line(send, lines)
        except EngineGone as error:
            await _line(send, {"error": str(error)})
    await send({"type": "http.response.body", "body": b""})


async def _line(send: Send, value: Any) -> None:
    body = json.dumps(value).encode() + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _reply(send: Send, status: int, value: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def _body(receive: Receive) -> Any:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return json.loads(body)


async def _live(receive: Receive, send: Send) -> None:
    for _ in range(2):
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
