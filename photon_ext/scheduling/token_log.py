"""The tokens of rows that decode together, step after step, as the pipeline reports them."""

from __future__ import annotations

from typing import Any

from photon_ext.runtime import Row
from photon_ext.scheduling.sequence import Sequence


class TokenLog:
    """Columns of one batch, whose place in `rows`, `sequences` and `requests` they have; a step is
    one entry of `steps`. Each request follows its column, and takes it over when the batch changes
    or the request ends, but for those in `watched` columns, whose tokens are handled one by one or
    are told already.
    """

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.sequences: tuple[Sequence, ...] = ()
        self.watched: tuple[int, ...] = ()
        self.requests: tuple[Any, ...] = ()
        self.steps: list[list[int]] = []

    def follow(self, rows: tuple[Row, ...], sequences: tuple[Sequence, ...]) -> None:
        """Another batch decodes from here on."""
        for sequence in self.sequences:
            if not sequence.watched:
                sequence.request.settle()
        self.rows, self.sequences, self.steps = rows, sequences, []
        self.requests = tuple(sequence.request for sequence in sequences)
        self.watched = tuple(
            column for column, one in enumerate(sequences) if one.watched or one.repeats
        )
        for column, sequence in enumerate(sequences):
            if not (sequence.watched or sequence.repeats or sequence.ended):
                sequence.request.follow(self.steps, column)
