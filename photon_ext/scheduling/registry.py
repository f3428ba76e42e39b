"""The registry: every request that has not ended, by its id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from photon_ext.scheduling.sequence import Sequence, Sink


class Registry(Generic[Sink]):
    """Who has been submitted and has not ended. Nobody else keeps a list or a count of them.

    Any thread may add and look; the engine thread removes. Each method is one operation of a dict,
    so neither another thread nor Ctrl-C finds it half done.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence[Sink]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def live(self) -> tuple[Sequence[Sink], ...]:
        """All of them, oldest first."""
        return tuple(self._sequences.copy().values())  # the copy: others may add meanwhile

    def find(self, request_id: int) -> Sequence[Sink] | None:
        """The sequence of a request; None once it has ended."""
        return self._sequences.get(request_id)

    def add(self, sequences: Iterable[Sequence[Sink]]) -> None:
        """They were submitted together."""
        self._sequences.update([(sequence.id, sequence) for sequence in sequences])

    def remove(self, sequence: Sequence[Sink]) -> None:
        """It has ended. KeyError: it is not here."""
        del self._sequences[sequence.id]
