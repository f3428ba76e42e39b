"""The rows of a pipeline: which are there, which have prompts left, which decode, which end."""

from __future__ import annotations

from photon_ext.runtime.row import Row, RowState


class Roster:
    """Rows from admission to release, in order of admission. Who rides when, a planner decides."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._prefill: dict[int, Row] = {}
        self._decoding: dict[int, Row] = {}
        self._ending: list[Row] = []
        self._decode: tuple[Row, ...] | None = ()

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows not yet released, those that have ended included."""
        return tuple(self._rows.values())

    @property
    def prefill(self) -> tuple[Row, ...]:
        """Rows with some of their prompt to launch."""
        return tuple(self._prefill.values())

    @property
    def decode(self) -> tuple[Row, ...]:
        """Rows with a token to launch, in the order in which they came to decode: the same tuple as
        long as nobody joins, leaves or ends.
        """
        if self._decode is None:
            self._decode = tuple(self._decoding.values())
        return self._decode

    def holds(self, row: Row) -> bool:
        """Whether the row is one of these."""
        return self._rows.get(row.index) is row

    def add(self, row: Row) -> None:
        """A row was admitted."""
        self._rows[row.index] = self._prefill[row.index] = row

    def regroup(self) -> None:
        """Some row may decode no more, as steps in flight cover its cap."""
        self._decoding = {i: row for i, row in self._decoding.items() if row.wants_decode}
        self._decode = None

    def prompt_done(self, row: Row) -> None:
        """The last of a row's prompt was launched: it decodes from the next step on."""
        del self._prefill[row.index]
        if row.wants_decode:
            self._decoding[row.index] = row
            self._decode = None

    def finish(self, row: Row, state: RowState = RowState.FINISHED) -> None:
        """A row's sequence ends, or drains; nothing of it is launched any more."""
        row.move(state)
        if self._decoding.pop(row.index, None) is not None:
            self._decode = None
        self._prefill.pop(row.index, None)
        if row.batch is not None:
            row.batch.intact = False
        if row not in self._ending:
            self._ending.append(row)

    def take_unused(self, committed: int) -> list[Row]:
        """Rows that have ended and that no step after number `committed` holds; they are released
        and no more here. A row that drained has ended by then.
        """
        unused = [row for row in self._ending if row.last_step <= committed]
        for row in unused:
            if row.state is RowState.DRAINING:
                row.move(RowState.FINISHED)
            row.move(RowState.RELEASED)
            self._ending.remove(row)
            del self._rows[row.index]
        return unused
