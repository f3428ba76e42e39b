"""The tokens of rows that decode together, step after step, as the pipeline reports them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Generic

from photon_ext.runtime import Row
from photon_ext.runtime.decode_batch import changed_columns, patched
from photon_ext.scheduling.sequence import Sequence, Sink

MOST = 256  # columns of tokens, from which on another batch begins anew


class TokenLog(Generic[Sink]):
    """A view of what steps gave, which owns no request. `steps` has a column of tokens for each
    step, or several where a row got several; a negative number in it is no token. A row's place in
    a column is that in `rows`, `sequences` and `ids`. A request is attached to its place. It
    materializes its tokens (takes them over) when another request comes into the place, or when it
    ends. Requests in `host_checked` places are not attached: their tokens are handled one by one,
    or are told already.

    Attributes:
        ids: int64, of the requests; the same object while the same rows decode.
    """

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.sequences: list[Sequence[Sink]] = []
        self.host_checked: tuple[int, ...] = ()
        self.ids = array("q")
        self.steps: list[array[int]] = []

    def attach(self, rows: tuple[Row, ...], sequence_of: Callable[[Row], Sequence[Sink]]) -> None:
        """Another batch decodes from here on. Places that stay go on in the same steps, so that a
        row that joins or leaves costs the others nothing; but the steps of rows that have left are
        not kept for long.
        """
        if len(self.steps) >= MOST or not self.rows:
            self._materialize(range(len(self.sequences)))
            self.rows, self.sequences, self.ids, self.host_checked = (), [], array("q"), ()
            self.steps = []
        changed, size = changed_columns(self.rows, rows), len(self.rows)
        self._materialize(column for column in (*changed, *range(len(rows), size)) if column < size)
        ids = self.ids[: len(rows)]
        del self.sequences[len(rows) :]
        for column in changed:
            sequence = sequence_of(rows[column])
            self.sequences[column : column + 1] = [sequence]
            ids[column : column + 1] = array("q", (sequence.id,))
            if not (sequence.host_checked or sequence.repeats or sequence.ended):
                sequence.sink.attach(self.steps, column)
        self.rows, self.ids = rows, ids
        self.host_checked = patched(self.host_checked, changed, self.sequences, _is_host_checked)

    def _materialize(self, columns: Iterable[int]) -> None:
        """The requests in these places take over what is theirs."""
        for column in columns:
            if not self.sequences[column].host_checked:
                self.sequences[column].sink.materialize()


def _is_host_checked(sequence: Sequence) -> bool:
    return sequence.host_checked or sequence.repeats > 0
