"""The text of one request's tokens, and where a stop string ends it."""

from __future__ import annotations

from typing import Protocol

from photon_ext.sampling.stop_automaton import StopAutomaton


class Detokenizer(Protocol):
    """As models.text.detokenizer has it."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TextReader:
    """Makes text for one reader; without a detokenizer all text is empty."""

    def __init__(self, detokenizer: Detokenizer | None = None) -> None:
        self._detokenizer = detokenizer

    def push(self, token: int) -> str:
        """Takes one token; returns the text that is certain now, often one word, sometimes none."""
        return "" if self._detokenizer is None else self._detokenizer.push(token)

    def finish(self) -> str:
        """The rest, once no token follows: unfinished characters."""
        return "" if self._detokenizer is None else self._detokenizer.flush()


class StoppedText(TextReader):
    """Text that is cut before the first stop string to be complete, however tokens split it, and
    never shows a part of one. Of several that end with the same character the longest counts. With
    `include_stop` it is cut behind it.

    Attributes:
        found: the stop string that is complete; the request ends there. None: none is.
        pieces: what was returned so far.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: StopAutomaton, include_stop: bool = False
    ) -> None:
        super().__init__(detokenizer)
        self.found: str | None = None
        self.pieces: list[str] = []
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, token: int) -> str:
        self.pieces.append(self._cut(super().push(token)))
        return self.pieces[-1]

    def finish(self) -> str:
        piece = "" if self.found is not None else self._cut(super().finish())
        self.pieces.append(piece + self._held)
        self._held, self._state = "", 0
        return self.pieces[-1]

    def _cut(self, piece: str) -> str:
        if self.found is not None:
            return ""
        self._state, read = self._stops.scan(self._state, piece)
        text = self._held + piece[:read]
        complete = self._stops.complete(self._state)
        certain = len(text) - (complete or self._stops.held(self._state))
        self.found = text[certain:] if complete else None
        self._held = "" if complete else text[certain:]
        return text if complete and self._include_stop else text[:certain]


class MadeText(TextReader):
    """What the engine thread has made, for one reader of a request with stop strings."""

    def __init__(self, made: StoppedText) -> None:
        self._pieces = iter(made.pieces)  # goes on with pieces that come later

    def push(self, token: int) -> str:
        return next(self._pieces)

    def finish(self) -> str:
        return next(self._pieces)
