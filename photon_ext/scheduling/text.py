"""Tokens in, text out, a piece at a time: incremental decoding and stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from photon_ext.sampling.stop_automaton import StopAutomaton

if TYPE_CHECKING:
    from photon_ext.models.detokenizer import Detokenizer


class StopStrings:
    """Cuts a stream of text before the first stop string to be complete, and never gives out a part
    of one.

    Of several stops that become complete with the same character the longest counts. The result
    does not depend on how the text is split into pieces.
    """

    def __init__(self, automaton: StopAutomaton | None) -> None:
        """`automaton`: of the stop strings; None: there are none, and all text is shown at once."""
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Takes a piece; returns what may be shown. After a hit it returns nothing."""
        if self.hit or self._automaton is None:
            return "" if self.hit else piece
        self._state, read = self._automaton.scan(self._state, piece)
        text = self._held + piece[:read]
        self.hit = self._automaton.complete(self._state) > 0
        certain = len(text) - (
            self._automaton.complete(self._state) or self._automaton.held(self._state)
        )
        self._held = "" if self.hit else text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """Text of one request: decoding, then stop strings. Without a detokenizer all text is empty."""

    def __init__(self, detokenizer: Detokenizer | None, stops: StopAutomaton | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """A stop string is complete; the request ends here."""
        return self._stops.hit

    def push(self, token: int) -> str:
        """Takes one token; returns the text that may be shown now, often one word, sometimes
        nothing.
        """
        return "" if self._detokenizer is None else self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest, once no token follows: unfinished characters, and what looked like the begin
        of a stop string.
        """
        if self._detokenizer is None or self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.finish()
