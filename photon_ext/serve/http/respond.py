"""Responses that write ASGI messages themselves: JSON at once, or events piece by piece."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front must not collect them
)
quoted = encode_basestring_ascii
"""A text as JSON. Only ASCII is in it: some clients take U+2028 and its like for ends of lines."""


def json_bytes(value: Any) -> bytes:
    """As compact JSON in ASCII. ValueError: a number is infinite or none."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    """A body of JSON."""

    def __init__(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(json_bytes(value), status, headers, "application/json")


class EventStream(Response):
    """Server-sent events. Each body is sent as it comes, with all the events that it holds; while
    a reader is slow, nothing more is asked for.
    """

    def __init__(self, bodies: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS]})
        async with aclosing(self._bodies) as bodies:  # also where the client leaves in between
            async for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
