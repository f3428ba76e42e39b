"""Which automata lie where among the words that the device has for them, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_ext.sampling.token_automaton import TokenAutomaton

Write = tuple[int, torch.Tensor]
"""Words for the device, and where the first goes; see RuntimePort.write_automaton."""


@dataclass(slots=True)
class _Place:
    """Where an automaton lies, and how many rows hold it."""

    begin: int
    end: int
    holders: int = 0


class AutomatonPool:
    """Automata of live rows, and those that nobody holds any more, until their place is needed:
    the least recently released one goes first (none that is held: I14). The engine thread owns it.

    The vocabulary of the first automaton lies before all of them, for good.

    Args:
        words: int32 words that there are.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self._writes: list[Write] = []
        self._begin = 0  # of the automata, behind the vocabulary
        self._places: dict[TokenAutomaton, _Place] = {}  # those that nobody holds in order

    @property
    def resident(self) -> int:
        """Automata that lie on the device."""
        return len(self._places)

    @property
    def held(self) -> int:
        """Of them, those that rows hold."""
        return sum(place.holders > 0 for place in self._places.copy().values())

    @property
    def held_bytes(self) -> int:
        """Bytes of those that rows hold."""
        places = self._places.copy().values()
        return 4 * sum(place.end - place.begin for place in places if place.holders)

    def take_writes(self) -> list[Write]:
        """What has to be written before the next row is admitted, in order; and forgets it."""
        writes, self._writes = self._writes, []
        return writes

    def hold(self, automaton: TokenAutomaton) -> int | None:
        """One more row holds it; returns where it begins, in words. None: there is no place until
        others are released.
        """
        place = self._places.get(automaton)
        if place is None and (place := self._placed(automaton)) is None:
            return None
        place.holders += 1
        return place.begin

    def release(self, automaton: TokenAutomaton) -> None:
        """One row less holds it: no step in flight reads it for that row."""
        place = self._places.pop(automaton)
        self._places[automaton] = place  # the last of those that nobody holds
        place.holders -= 1

    def _placed(self, automaton: TokenAutomaton) -> _Place | None:
        if not self._begin:
            vocabulary = automaton.vocabulary.tables
            self._writes.append((0, vocabulary))
            self._begin = len(vocabulary)
        begin = self._gap(len(automaton.tables))
        while begin is None:
            unheld = (one for one, place in self._places.items() if not place.holders)
            if (oldest := next(unheld, None)) is None:
                return None
            del self._places[oldest]
            begin = self._gap(len(automaton.tables))
        self._writes.append((begin, automaton.tables))
        place = self._places[automaton] = _Place(begin, begin + len(automaton.tables))
        return place

    def _gap(self, words: int) -> int | None:
        """Where so many words are free; None: nowhere."""
        begin = self._begin
        for place in sorted(self._places.values(), key=lambda place: place.begin):
            if place.begin - begin >= words:
                return begin
            begin = place.end
        return begin if self.words - begin >= words else None
