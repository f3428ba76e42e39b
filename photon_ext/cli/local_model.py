"""LocalModel: who answers in `photon-ext chat`, an engine in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from photon_ext.cli.conversation import AnswerFailed, Message, Piece
from photon_ext.engine import Engine
from photon_ext.errors import RequestError
from photon_ext.sampling import SamplingParams


class LocalModel:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(
        self, messages: list[Message], given: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The answer, piece by piece; whoever leaves it early ends it. Raises AnswerFailed."""
        try:
            request = self._engine.submit(messages, SamplingParams(**given))
        except RequestError as error:
            raise AnswerFailed(f"{error}; /clear begins another chat") from error
        try:
            for event in request.iter():
                yield Piece(event.text)
        finally:
            request.cancel()
            output = request.result()
        if output.error is not None:
            raise AnswerFailed(output.error)
        if output.stop_reason == "max_len":
            yield Piece("", note="the context is full; /clear begins another chat")
