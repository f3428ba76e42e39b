"""Gate: what every request passes, whatever it asks: limit, key, and a line in the log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from photon_ext.serve.http.errors import ApiError
from photon_ext.serve.http.route import error_response

ACCESS_LOG = logging.getLogger("photon_ext.access")
OPEN = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """The outermost part of the app.

    Attributes:
        ready: whether requests are served by now; the HTTP process tells its parent.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body: int,
        access_log: bool = True,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            api_keys: of which a request brings one, but for the paths in `OPEN`; (): it needs none.
            max_body: bytes.
            access_log: each request has a line there.
        """
        self.ready = ready
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in api_keys]
        self._max_body = max_body
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope, send)
        try:
            self._check(scope)
            await self._app(scope, _Bounded(receive, self._max_body).receive, visit.send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, visit.send)
        finally:
            if self._access_log:
                visit.log()

    def _check(self, scope: Scope) -> None:
        """Raises ApiError."""
        headers = dict(scope["headers"])
        if self._digests and scope["path"] not in OPEN and not self._knows(headers):
            raise ApiError(
                401,
                "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            raise _too_large(self._max_body)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a header has one of the keys, in a time that does not tell which."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = sha256(given).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        return bool(given) and any(found)


class _Bounded:
    """A body of no more than so many bytes."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = self._left = most

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise _too_large(self._most)
        return message


class _Visit:
    """One request: its id goes with the answer, and one line into the log."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = _header(scope["headers"], b"x-request-id")
        known = given is not None and _REQUEST_ID.fullmatch(given)
        self._id = given if known and given else f"req_{secrets.token_hex(12)}".encode()
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self._state: dict[str, Any] = scope.setdefault("state", {})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._state["status"] = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)

    def log(self) -> None:
        if not ACCESS_LOG.isEnabledFor(logging.INFO):
            return
        client = self._scope.get("client")
        line = {
            "id": self._id.decode(),
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self._state.get("status"),
            "ms": round(1e3 * (time.perf_counter() - self._began), 2),
            "left": bool(self._state.get("left")),
            **(self._state["log"]() if "log" in self._state else {}),
        }
        ACCESS_LOG.info(json.dumps(line))


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _too_large(most: int) -> ApiError:
    told = f"the body is larger than {most} bytes, which this server takes at most; send less"
    return ApiError(413, told, code="body_too_large", headers={"connection": "close"})
