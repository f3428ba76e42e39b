"""Which automata lie where among the words that the device has for them, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_ext.sampling.token_automaton import TokenAutomaton
from photon_ext.scheduling.range_pool import RangePool

Write = tuple[int, torch.Tensor]
"""Words for the device, and where the first goes; see RuntimePort.write_automaton."""


@dataclass(slots=True)
class _Place:
    """Where an automaton lies, and how many rows hold it."""

    begin: int
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
        self._ranges = RangePool(words)
        self._writes: list[Write] = []
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
        places = self._places.copy().items()
        return sum(one.tables.nbytes for one, place in places if place.holders)

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
        if self._ranges.free == self.words:  # the first of all
            vocabulary = automaton.vocabulary.tables
            self._writes.append((0, vocabulary))
            self._ranges.allocate(len(vocabulary))
        while (begin := self._ranges.allocate(len(automaton.tables))) is None:
            unheld = (one for one, place in self._places.items() if not place.holders)
            if (oldest := next(unheld, None)) is None:
                return None
            self._ranges.release(self._places.pop(oldest).begin)
        self._writes.append((begin, automaton.tables))
        place = self._places[automaton] = _Place(begin)
        return place
