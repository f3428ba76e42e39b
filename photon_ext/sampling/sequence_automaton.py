"""Finds many sequences of integers at once, an element at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

# of an element; a state and an element make one integer, the key of their transition
_ELEMENT_BITS = 32


class SequenceAutomaton:
    """Reads a sequence and knows after each element the longest end of it that begins one of those
    it looks for, and which of them end there, by a few dictionary look-ups, however many there are.

    It is the automaton of Aho and Corasick ("Efficient string matching", 1975): a state is a
    beginning of one of them, and 0 the empty one. It never changes, so threads may share one.
    """

    def __init__(self, sequences: Iterable[Iterable[int]]) -> None:
        """`sequences`: not empty, of integers from 0 to 2**32 - 1. Takes about a microsecond for
        each of their elements.
        """
        self._next: dict[int, int] = {}
        self._held = array("i", [0])
        parents, elements = [0], [0]
        ends = {self._add(sequence, parents, elements) for sequence in sequences}
        self._fallback = array("i", [0]) * len(parents)
        self._complete = array("i", [0]) * len(parents)
        # a fallback is shorter, and so there before
        for state in sorted(range(1, len(parents)), key=self._held.__getitem__):
            if parents[state]:
                shorter = self._fallback[parents[state]]
                self._fallback[state] = self.after(shorter, elements[state])
            shorter = self._fallback[state]
            self._complete[state] = self._held[state] if state in ends else self._complete[shorter]

    def held(self, state: int) -> int:
        """Elements of the longest end of what was read that begins one of the sequences."""
        return self._held[state]

    def complete(self, state: int) -> int:
        """Elements of the longest of them that ends where was read to; 0 where none does."""
        return self._complete[state]

    def ends(self, state: int) -> Iterator[int]:
        """The states of all of them that end where was read to, the longest first."""
        while self._complete[state]:
            if self._complete[state] == self._held[state]:
                yield state
            state = self._fallback[state]

    def after(self, state: int, element: int) -> int:
        """The state after one more element: that of the longest end that goes on with it."""
        while (found := self._next.get(state << _ELEMENT_BITS | element)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return found

    def _add(self, sequence: Iterable[int], parents: list[int], elements: list[int]) -> int:
        """Makes the states of one sequence; returns the last."""
        state = 0
        for element in sequence:
            key = state << _ELEMENT_BITS | element
            if key not in self._next:
                self._next[key] = len(parents)
                self._held.append(self._held[state] + 1)
                parents.append(state)
                elements.append(element)
            state = self._next[key]
        return state
