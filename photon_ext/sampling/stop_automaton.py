"""Finds many stop strings at once, a character at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# of a code point; a state and a character make one integer, the key of their transition
_CHARACTER_BITS = 21


class StopAutomaton:
    """Reads text and knows after each character the longest end of it that begins a stop string,
    and the longest that is one, by a few dictionary look-ups, however many strings there are.

    It is the automaton of Aho and Corasick ("Efficient string matching", 1975): a state is a
    beginning of a stop string, and 0 the empty one. It never changes, so threads may share one.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops`: non-empty strings. Takes about a microsecond for each of their characters."""
        self._next: dict[int, int] = {}
        self._held = array("i", [0])
        parents, characters = [0], [0]
        ends = {self._add(stop, parents, characters) for stop in stops}
        self._fallback = array("i", [0]) * len(parents)
        self._complete = array("i", [0]) * len(parents)
        # a fallback is shorter, and so there before
        for state in sorted(range(1, len(parents)), key=self._held.__getitem__):
            if parents[state]:
                shorter = self._fallback[parents[state]]
                self._fallback[state] = self._after(shorter, characters[state])
            shorter = self._fallback[state]
            self._complete[state] = self._held[state] if state in ends else self._complete[shorter]

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """The state, from `state` on, after the first character of `text` that completes a stop
        string, or the last; and how many characters that took.
        """
        for index, character in enumerate(text):
            state = self._after(state, ord(character))
            if self._complete[state]:
                return state, index + 1
        return state, len(text)

    def held(self, state: int) -> int:
        """Characters of the longest end of what was read that begins a stop string."""
        return self._held[state]

    def complete(self, state: int) -> int:
        """Characters of the longest stop string that ends where was read to; 0 where none does."""
        return self._complete[state]

    def _add(self, stop: str, parents: list[int], characters: list[int]) -> int:
        """Makes the states of one string; returns the last."""
        state = 0
        for character in map(ord, stop):
            key = state << _CHARACTER_BITS | character
            if key not in self._next:
                self._next[key] = len(parents)
                self._held.append(self._held[state] + 1)
                parents.append(state)
                characters.append(character)
            state = self._next[key]
        return state

    def _after(self, state: int, character: int) -> int:
        """The state after one more character: that of the longest end that goes on with it."""
        while (found := self._next.get(state << _CHARACTER_BITS | character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return found
