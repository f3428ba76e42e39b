"""The tokens of rows that decode together, step after step, as the pipeline reports them."""

from __future__ import annotations

from photon_ext.runtime import Row, StepResult
from photon_ext.scheduling.sequence import Sequence


class TokenLog:
    """Columns of one batch: a step is one entry, whatever its rows are.

    Each request follows its column and takes over what it holds when the batch changes or the
    request ends.

    Attributes:
        rows: the batch; its place in this tuple is a row's column.
        sequences: of these rows.
        watched: columns of sequences whose tokens are handled one by one.
        steps: the tokens of each step.
    """

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.sequences: tuple[Sequence, ...] = ()
        self.watched: tuple[int, ...] = ()
        self.steps: list[list[int]] = []

    def follow(self, rows: tuple[Row, ...], sequences: tuple[Sequence, ...]) -> None:
        """Another batch decodes from here on."""
        for sequence in self.sequences:
            if not sequence.watched:
                sequence.request.settle()
        self.rows, self.sequences, self.steps = rows, sequences, []
        self.watched = tuple(i for i, sequence in enumerate(sequences) if sequence.watched)
        for column, sequence in enumerate(sequences):
            if not sequence.watched and not sequence.ended:
                sequence.request.follow(self.steps, column)

    def append(self, result: StepResult) -> None:
        """A step of this batch was committed; what has ended was settled before."""
        self.steps.append(result.tokens)
