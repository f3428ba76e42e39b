"""RemoteModel: who answers in `photon-ext chat --url`, any server with OpenAI's endpoints."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from photon_ext.cli.conversation import AnswerFailed, Message, Piece
from photon_ext.cli.server_events import events
from photon_ext.cli.terminal import printable
from photon_ext.errors import ConfigError, describe, shortened, shown

_HERE = ("localhost", "127.0.0.1", "::1")  # reached without a proxy
_FIRST_S = 10.0  # in which a server says what it has
_SILENT_S = 600.0  # in which the next token comes: a request may wait for others
_NAMES = {"max_new_tokens": "max_tokens"}
_REMEDIES = {
    401: "; give a key by --api-key, or in PHOTON_API_KEY",
    403: "; give another key by --api-key, or in PHOTON_API_KEY",
    404: "; see whether --url and --model are right",
    429: "; /retry asks again",
    503: "; /retry asks again",
}


class _StaysHere(HTTPRedirectHandler):
    """The key goes to no other server than the one that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RemoteModel:
    """
    Attributes:
        name: of the model.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        """
        Args:
            url: of the server; without a path, /v1 is meant.
            model: None: the first that the server has.

        Raises:
            ConfigError: the URL or the key is none. AnswerFailed: the server does not say what it
                has.
        """
        self._base = base_url(url)
        own = [ProxyHandler({})] if urlsplit(self._base).hostname in _HERE else []
        self._opener = build_opener(_StaysHere, *own)
        self._headers = {"Content-Type": "application/json", "User-Agent": "photon-ext"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError(
                    "the API key has characters that no header holds; give printable ASCII"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = self._first_model() if model is None else model

    def answer(
        self, messages: list[Message], given: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The answer, piece by piece; whoever leaves it early closes the connection, which ends the
        request. Raises AnswerFailed.
        """
        asked = {_NAMES.get(name, name): value for name, value in given.items()}
        asked |= {"model": self.name, "messages": messages, "stream": True}
        with self._open("/chat/completions", _SILENT_S, asked) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise AnswerFailed(f"{self._base} sends {kind}, not a stream of events")
            yield from self._pieces(response)

    def _pieces(self, response: HTTPResponse) -> Iterator[Piece]:
        ended = False
        try:
            for data in events(response):
                if data == "[DONE]":
                    return
                event = _object(data)
                if event.get("error") is not None:
                    raise AnswerFailed(f"the answer broke off: {_message(data)}")
                for choice in event.get("choices") or ():
                    ended = ended or choice.get("finish_reason") is not None
                    yield from _pieces_of(choice)
        except (OSError, HTTPException) as error:
            raise AnswerFailed(f"the connection broke off ({describe(error)})") from error
        if not ended:
            raise AnswerFailed("the server ended the connection before the answer")

    def _first_model(self) -> str:
        with self._open("/models", _FIRST_S) as response:
            told = _object(response.read().decode("utf-8", "replace"))
        names = [str(one.get("id")) for one in told.get("data") or ()]
        if not names:
            raise AnswerFailed(f"{self._base}/models names no model; give --model")
        return names[0]

    def _open(self, path: str, seconds: float, body: Any = None) -> HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self._base + path, content, self._headers)
            return cast("HTTPResponse", self._opener.open(request, timeout=seconds))
        except HTTPError as error:
            raise AnswerFailed(_refusal(error)) from error
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            told = describe(cause) if isinstance(cause, BaseException) else cause
            raise AnswerFailed(
                f"{self._base} cannot be reached ({told}); does a server run there?"
            ) from error


def base_url(url: str) -> str:
    """What paths such as /chat/completions are put behind. Raises ConfigError."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        fits = fits and parts.username is None
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment:
        raise ConfigError(f"--url is {shown(url)}; give one such as http://localhost:8000")
    return whole.rstrip("/") if parts.path.strip("/") else f"{whole.rstrip('/')}/v1"


def _pieces_of(choice: Mapping[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta") or {}
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece(str(thought), is_thought=True)
    if text := delta.get("content"):
        yield Piece(str(text))
    if choice.get("finish_reason") == "length":
        yield Piece("", note="the answer was cut: max_new_tokens, or the context is full")


def _refusal(error: HTTPError) -> str:
    body = ""
    with error, suppress(OSError, HTTPException):
        body = error.read(2**16).decode("utf-8", "replace")
    wait = error.headers.get("retry-after")
    after = f"; it asks to wait {shortened(wait)} s" if wait else ""
    told = _message(body) or error.reason
    return f"the server answers {error.code}: {told}{after}{_REMEDIES.get(error.code, '')}"


def _message(body: str) -> str:
    """What a body says of an error, in one of the shapes that servers have; else its begin."""
    told = _object(body)
    error = told.get("error") or told.get("detail") or told.get("message") or body
    if isinstance(error, dict):
        error = error.get("message") or body
    return printable(shortened(" ".join(str(error).split()), 500))


def _object(text: str) -> dict[str, Any]:
    """Of JSON; what is no object has no fields."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
