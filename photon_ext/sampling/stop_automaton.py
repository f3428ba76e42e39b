"""Finds many stop strings at once, a character at a time."""

from __future__ import annotations

from collections.abc import Iterable

from photon_ext.sampling.sequence_automaton import SequenceAutomaton


class StopAutomaton(SequenceAutomaton):
    """The automaton of stop strings: its elements are characters."""

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops`: non-empty strings."""
        super().__init__(map(ord, stop) for stop in stops)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """The state, from `state` on, after the first character of `text` that completes a stop
        string, or the last; and how many characters that took.
        """
        for index, character in enumerate(text):
            state = self.after(state, ord(character))
            if self._complete[state]:
                return state, index + 1
        return state, len(text)
