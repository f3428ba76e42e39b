"""RemoteModel: who answers in `photon-ext chat --url`, any server with OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any

from photon_ext.cli.conversation import AnswerFailed, Message, Piece
from photon_ext.cli.remote_server import RemoteServer, ServerError, error_message, json_object
from photon_ext.cli.server_events import events
from photon_ext.errors import describe

_SILENT_S = 600.0  # in which the next token comes: a request may wait for others
_NAMES = {"max_new_tokens": "max_tokens"}


class RemoteModel:
    """
    Attributes:
        name: of the model.
    """

    def __init__(self, server: RemoteServer, model: str | None) -> None:
        """`model`: None: the first that the server has. Raises ServerError."""
        self.name = model or server.first_model()
        self._server = server

    def answer(
        self, messages: list[Message], given: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The answer, piece by piece; whoever leaves it early closes the connection, which ends the
        request. Raises AnswerFailed.
        """
        asked = {_NAMES.get(name, name): value for name, value in given.items()}
        asked |= {"model": self.name, "messages": messages, "stream": True}
        try:
            with self._server.open("/chat/completions", _SILENT_S, asked) as response:
                yield from self._pieces(response)
        except ServerError as error:
            raise AnswerFailed(str(error)) from error

    def _pieces(self, response: HTTPResponse) -> Iterator[Piece]:
        kind, ended = response.headers.get_content_type(), False
        if kind != "text/event-stream":
            raise AnswerFailed(f"{self._server.base} sends {kind}, not a stream of events")
        try:
            for data in events(response):
                if data == "[DONE]":
                    return
                event = json_object(data)
                if event.get("error") is not None:
                    raise AnswerFailed(f"the answer broke off: {error_message(data)}")
                for choice in event.get("choices") or ():
                    ended = ended or choice.get("finish_reason") is not None
                    yield from _pieces_of(choice)
        except (OSError, HTTPException) as error:
            raise AnswerFailed(f"the connection broke off ({describe(error)})") from error
        except (AttributeError, TypeError) as error:
            raise AnswerFailed(f"{self._server.base} sends events of another shape") from error
        if not ended:
            raise AnswerFailed("the server ended the connection before the answer")


def _pieces_of(choice: Mapping[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta") or {}
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece(str(thought), is_thought=True)
    if text := delta.get("content"):
        yield Piece(str(text))
    if choice.get("finish_reason") == "length":
        yield Piece("", note="the answer was cut: max_new_tokens, or the context is full")
