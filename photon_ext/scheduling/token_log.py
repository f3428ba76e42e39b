"""The tokens of rows that decode together, step after step, as the pipeline reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from photon_ext.runtime import Row
from photon_ext.runtime.decode_batch import changed_columns, patched
from photon_ext.scheduling.sequence import Sequence

MOST = 256  # steps, from which on another batch begins anew


class TokenLog:
    """Columns of one batch, whose place in `rows`, `sequences` and `requests` they have; a step is
    one entry of `steps`. Each request follows its column, and takes it over when another comes into
    its place or the request ends, but for those in `watched` columns, whose tokens are handled one
    by one or are told already.
    """

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.sequences: list[Sequence] = []
        self.watched: tuple[int, ...] = ()
        self.requests: tuple[Any, ...] = ()
        self.steps: list[list[int]] = []

    def follow(self, rows: tuple[Row, ...], sequence_of: Callable[[Row], Sequence]) -> None:
        """Another batch decodes from here on. Columns that stay go on in the same steps, so that a
        row that joins or leaves costs the others nothing; but the steps of rows that have left are
        not kept for long.
        """
        if len(self.steps) >= MOST or not self.rows:
            self._settle(range(len(self.sequences)))
            self.rows, self.sequences, self.requests, self.watched = (), [], (), ()
            self.steps = []
        changed, size = changed_columns(self.rows, rows), len(self.rows)
        self._settle(column for column in (*changed, *range(len(rows), size)) if column < size)
        requests = [*self.requests[: len(rows)]]
        del self.sequences[len(rows) :]
        for column in changed:
            sequence = sequence_of(rows[column])
            self.sequences[column : column + 1] = [sequence]
            requests[column : column + 1] = [sequence.request]
            if not (sequence.watched or sequence.repeats or sequence.ended):
                sequence.request.follow(self.steps, column)
        self.rows, self.requests = rows, tuple(requests)
        self.watched = patched(self.watched, changed, self.sequences, _is_watched)

    def _settle(self, columns: Iterable[int]) -> None:
        """The requests in these columns take over what is theirs."""
        for column in columns:
            if not self.sequences[column].watched:
                self.sequences[column].request.settle()


def _is_watched(sequence: Sequence) -> bool:
    return sequence.watched or sequence.repeats
