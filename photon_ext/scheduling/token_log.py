"""The tokens of rows that decode together, step after step, as the pipeline reports them."""

from __future__ import annotations

from typing import Any

from photon_ext.runtime import Row
from photon_ext.scheduling.sequence import Sequence

MOST = 64  # steps, from which on another batch begins anew


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
        """Another batch decodes from here on. Leading columns that stay go on in the same steps, so
        that a row that joins costs the others nothing; but the steps of rows that have left are not
        kept for long.
        """
        stay = _common(self.rows, rows) if len(self.steps) < MOST else 0
        for sequence in self.sequences[stay:]:
            if not sequence.watched:
                sequence.request.settle()
        if not stay:
            self.steps = []
        self.rows, self.sequences = rows, sequences
        self.requests = tuple(sequence.request for sequence in sequences)
        self.watched = tuple(i for i, one in enumerate(sequences) if one.watched or one.repeats)
        for column, sequence in enumerate(sequences[stay:], stay):
            if not (sequence.watched or sequence.repeats or sequence.ended):
                sequence.request.follow(self.steps, column)


def _common(rows: tuple[Row, ...], others: tuple[Row, ...]) -> int:
    """How many leading rows the two have in common."""
    pairs = enumerate(zip(rows, others, strict=False))
    return next((i for i, (row, other) in pairs if row is not other), min(len(rows), len(others)))
