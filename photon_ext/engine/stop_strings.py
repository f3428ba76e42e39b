"""Stop strings: the text of a request that ends where one of them is complete."""

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

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Takes a piece; returns what may be shown. After a hit it returns nothing."""
        if self.found is not None:
            return ""
        self._state, read = self._automaton.scan(self._state, piece)
        text = self._held + piece[:read]
        complete = self._automaton.complete(self._state)
        certain = len(text) - (complete or self._automaton.held(self._state))
        self.found = text[certain:] if complete else None
        self._held = "" if complete else text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class StoppedText:
    """Text of one request with stop strings, which the engine makes: decoding, then the stops."""

    def __init__(self, detokenizer: Detokenizer, stops: StopAutomaton) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    @property
    def found(self) -> str | None:
        """The stop string that is complete; the request ends here. None: none is."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Takes one token; returns the text that may be shown now, often one word, sometimes
        nothing.
        """
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest, once no token follows: unfinished characters, and what looked like the begin
        of a stop string.
        """
        if self.found is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.finish()
