"""JsonRoute: a body is read and checked, and an answer written, as long as its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias, get_type_hints

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from photon_ext.serve.http.errors import NO_NAMES, ApiError, any_error, bad_request
from photon_ext.serve.http.fields import Fields
from photon_ext.serve.http.respond import Json

# A body is checked in one turn of the event loop, in which no other client is served: what these
# allow takes half a second. No context holds a prompt of as many.
MOST_BRACKETS, MOST_COMMAS = 2**18, 2**21
Endpoint: TypeAlias = Callable[..., Awaitable[Response]]


def error_response(error: Exception, path: str, names: Mapping[str, str] = NO_NAMES) -> Response:
    """`names`: see Fields.engine_names."""
    told = any_error(error, names)
    return Json(told.body_for(path), told.status, told.headers)


class JsonRoute(APIRoute):
    """A route whose endpoint is `async def endpoint(body: SomeFields, request: Request)`, or has no
    body. FastAPI has the route and its page of the OpenAPI document. The body is checked by
    pydantic here, as bytes: FastAPI would make Python values of it first, and take NaN for a
    number.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Endpoint = self.endpoint
        kind = get_type_hints(endpoint).get("body")

        async def handle(request: Request) -> Response:
            if kind is not None:
                return _WatchedAnswer(endpoint, kind)
            try:
                return await endpoint(request)
            except Exception as error:
                return error_response(error, request.url.path)

        return handle


class _WatchedAnswer(Response):
    """Answers one request, and stops where its client leaves, streamed or not: the endpoint's task
    is cancelled, and with it what it has asked of the engine.
    """

    def __init__(self, endpoint: Endpoint, kind: type[Fields]) -> None:
        self.background = None
        self._endpoint = endpoint
        self._kind = kind
        self._names = NO_NAMES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._watched(Request(scope, receive, send), receive, send)
        except Exception as error:
            if "status" in scope["state"]:  # the answer has begun
                raise
            await error_response(error, scope["path"], self._names)(scope, receive, send)

    async def _watched(self, request: Request, receive: Receive, send: Send) -> None:
        _check_type(request.headers)
        content = await _read(receive)
        request.state.size = len(content)
        _check_parts(content)
        body = self._kind.model_validate_json(content)
        self._names = body.engine_names()
        answer = asyncio.ensure_future(self._answer(body, request, send))
        left = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                request.state.left = True
        finally:
            left.cancel()
            answer.cancel()
            await asyncio.wait((answer,))
        if not answer.cancelled():
            answer.result()

    async def _answer(self, body: Fields, request: Request, send: Send) -> None:
        response = await self._endpoint(body, request)
        await response(request.scope, request.receive, send)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(receive: Receive) -> bytes:
    """The body. Raises ApiError: its client has left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise bad_request("the body is not complete", code="incomplete_body")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_parts(content: bytes) -> None:
    brackets, commas = content.count(b"[") + content.count(b"{"), content.count(b",")
    if brackets > MOST_BRACKETS or commas > MOST_COMMAS:
        raise bad_request(
            f"the body has {brackets} opening brackets and {commas} commas; give at most "
            f"{MOST_BRACKETS} and {MOST_COMMAS}",
            code="body_too_complex",
        )


def _check_type(headers: Mapping[str, str]) -> None:
    """A page of another site may send a form or plain text from a browser without asking; JSON it
    may not.
    """
    given = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        told = f"the content type is {given!r}; send JSON with 'Content-Type: application/json'"
        raise ApiError(415, told, code="unsupported_media_type")
