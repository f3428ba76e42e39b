"""RemoteServer: a server with OpenAI's endpoints, as commands reach it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from photon_ext.cli.terminal import printable
from photon_ext.errors import ConfigError, PhotonError, describe, shortened, shown

API_KEY = "PHOTON_API_KEY"
_HERE = ("localhost", "127.0.0.1", "::1")  # reached without a proxy
_FIRST_S = 10.0  # in which a server says what it has
_REMEDIES = {
    401: "give a key by --api-key, or in PHOTON_API_KEY",
    403: "give another key by --api-key, or in PHOTON_API_KEY",
    404: "see whether its URL and --model are right",
    429: "try again later",
    503: "try again later",
}


class ServerError(PhotonError):
    """A server cannot be reached, or refuses."""


class _StaysHere(HTTPRedirectHandler):
    """The key goes to no other server than the one that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RemoteServer:
    """
    Attributes:
        base: its URL, which paths such as /chat/completions stand behind.
        api_key: what requests bring along; None: nothing.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """
        Args:
            url: without a path, /v1 is meant.
            api_key: None: the first in PHOTON_API_KEY, if there is one.

        Raises:
            ConfigError: one of them is none.
        """
        self.base = base_url(url)
        self.api_key = api_key or next(iter(os.environ.get(API_KEY, "").split()), None)
        own = [ProxyHandler({})] if urlsplit(self.base).hostname in _HERE else []
        self._opener = build_opener(_StaysHere, *own)
        self._headers = {"Content-Type": "application/json", "User-Agent": "photon-ext"}
        if self.api_key is not None:
            if not (self.api_key.isascii() and self.api_key.isprintable()):
                raise ConfigError(
                    "the API key has characters that no header holds; give printable ASCII"
                )
            self._headers["Authorization"] = f"Bearer {self.api_key}"

    def first_model(self) -> str:
        """The name of the first model that it lists. Raises ServerError."""
        with self.open("/models", _FIRST_S) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                raise ServerError(f"{self.base}/models lists no model; give --model") from error

    def open(self, path: str, seconds: float, body: Any = None) -> HTTPResponse:
        """The response to a request, a POST where there is a body.

        Args:
            seconds: in which something has to come, at first and then again and again.

        Raises:
            ServerError: it cannot be reached, or refuses; says why.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.base + path, content, self._headers)
            return cast("HTTPResponse", self._opener.open(request, timeout=seconds))
        except HTTPError as error:
            raise ServerError(_refusal(error)) from error
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            told = describe(cause) if isinstance(cause, BaseException) else cause
            raise ServerError(
                f"{self.base} cannot be reached ({told}); does a server run there?"
            ) from error


def base_url(url: str) -> str:
    """See RemoteServer. Raises ConfigError."""
    whole = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(whole)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"the URL is {shown(url)}; give one such as http://localhost:8000")
    return whole if parts.path else f"{whole}/v1"


def error_message(body: str) -> str:
    """What a body says of an error, in one of the shapes that servers have; else its begin."""
    error: Any = json_object(body) or body
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or body
    return printable(shortened(" ".join(str(error).split()), 500))


def json_object(text: str) -> dict[str, Any]:
    """Of JSON; what is no object has no fields."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _refusal(error: HTTPError) -> str:
    body = ""
    with error, suppress(OSError, HTTPException):
        body = error.read(2**16).decode("utf-8", "replace")
    wait = error.headers.get("retry-after")
    after = f"; it asks to wait {printable(shortened(wait))} s" if wait else ""
    remedy = f"; {_REMEDIES[error.code]}" if error.code in _REMEDIES else ""
    return f"the server answers {error.code}: {error_message(body) or error.reason}{after}{remedy}"
