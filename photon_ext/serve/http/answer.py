"""Answer: one answer's tokens as text, up to its stop."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from photon_ext.errors import PhotonError
from photon_ext.models.text.detokenizer import Detokenizer
from photon_ext.sampling.answer_text import StoppedText, TextReader
from photon_ext.sampling.stop_automaton import StopAutomaton
from photon_ext.serve.contract import Delta, End, TokenScore

_FINISHES = {"stop": "stop", "length": "length", "timeout": "length"}


class AnswerFailed(PhotonError, RuntimeError):
    """An answer has ended by an error, or was cancelled by others: nothing can be made of it."""


class Piece(NamedTuple):
    """What became certain with a token.

    Attributes:
        text: often a word, sometimes empty.
        token: its id; None: the rest of the text, behind the last token.
        score: its log-probability, where that was asked for.
        hidden: a stop token, whose text is not shown.
    """

    text: str
    token: int | None = None
    score: TokenScore | None = None
    hidden: bool = False


class AnswerRules(NamedTuple):
    """What all answers to a request have in common.

    Attributes:
        stops: finds the stop strings; None: there are none.
        stop_ids: tokens that end an answer. asked_ids: those of them that the request names.
        include_stop: the text ends with the stop.
        hides_all: the tokens that are run are not shown, nor counted.
    """

    stops: StopAutomaton | None = None
    stop_ids: Collection[int] = ()
    asked_ids: Collection[int] = ()
    include_stop: bool = False
    hides_all: bool = False


class Answer:
    """
    Attributes:
        tokens: how many it has, the one that ended it included.
        end: why it has ended; None: it goes on.
        cut: it was ended here, and the engine does not know.
        cached_tokens: of its prompt, see Delta.
    """

    def __init__(self, detokenizer: Detokenizer, rules: AnswerRules) -> None:
        self.tokens = 0
        self.end: End | None = None
        self.cut = False
        self.cached_tokens: int | None = None
        self._rules = rules
        self._stopped: StoppedText | None = None
        if rules.stops is not None:
            self._stopped = StoppedText(detokenizer, rules.stops, rules.include_stop)
        self._text: TextReader = self._stopped or TextReader(detokenizer)

    def take(self, delta: Delta) -> list[Piece]:
        """The pieces of what has come. Raises AnswerFailed, RequestError."""
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        pieces: list[Piece] = []
        if self.end is None and not self._rules.hides_all:
            self._read(delta, pieces)
        if delta.end is not None and self.end is None:
            self._finish(delta.end, pieces)
        return pieces

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words."""
        return None if self.end is None else _FINISHES[self.end.finish_reason]

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, the id of a stop token that was asked for, or "timeout"."""
        if self.end is None or self.end.finish_reason == "length":
            return None
        if self.end.finish_reason == "timeout":
            return "timeout"
        asked = self.cut or self.end.stop_reason in self._rules.asked_ids
        return self.end.stop_reason if asked else None

    def stop(self, too_many: int) -> None:
        """Ends it before its last tokens, as nothing more is wanted of it."""
        self.tokens -= too_many
        if self.end is None:
            self.end, self.cut = End("stop"), True

    def _read(self, delta: Delta, pieces: list[Piece]) -> None:
        scores = None if delta.scores is None else iter(delta.scores)
        push, stop_ids, stopped = self._text.push, self._rules.stop_ids, self._stopped
        for token in delta.tokens:
            score = None if scores is None else next(scores, None)
            self.tokens += 1
            hidden = token in stop_ids and not self._rules.include_stop
            pieces.append(Piece("" if hidden else push(token), token, score, hidden))
            if stopped is not None and stopped.found is not None:
                self.end, self.cut = End("stop", stopped.found), True
                return

    def _finish(self, end: End, pieces: list[Piece]) -> None:
        if end.finish_reason not in _FINISHES:
            raise AnswerFailed(end.error or "the answer was cancelled; try again")
        if self._rules.hides_all:
            self.end = End("length")
            return
        self.end = end
        rest = self._text.finish()
        if rest:
            pieces.append(Piece(rest))
