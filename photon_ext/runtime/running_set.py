"""The rows of a pipeline: which are there, which have prompts left, which decode, which end."""

from __future__ import annotations

from collections.abc import Iterable

from photon_ext.runtime.row import Row, RowState

_NOBODY: frozenset[Row] = frozenset()


class RunningSet:
    """Rows from admission to release, in order of admission. Who is scheduled when, a planner
    decides.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._prefill: dict[int, Row] = {}
        self._decoding: list[Row] = []
        self._full: list[Row] = []
        self._ending: list[Row] = []
        self._decode: tuple[Row, ...] | None = ()
        self._covered: dict[
            int, Row
        ] = {}  # rows whose steps in flight may give all tokens that are left

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
        """Rows with a token to launch: the same tuple as long as nobody joins, leaves or ends. Who
        joins is the last, and the last takes the place of who leaves: all others keep theirs.
        """
        if self._decode is None:
            self._decode = tuple(self._decoding)
        return self._decode

    @property
    def lacks_pages(self) -> bool:
        """Whether a row has a token to launch, and no page for it."""
        if self._full:
            lacking = [row for row in self._full if row.steps_left < 1]
            self._full = [row for row in lacking if row.wants_decode]
        return bool(self._full)

    @property
    def ended(self) -> frozenset[Row]:
        """Rows that are not released, and whose tokens in flight are skipped."""
        if not self._ending:  # as nearly always
            return _NOBODY
        return frozenset(row for row in self._ending if not row.delivers)

    def holds(self, row: Row) -> bool:
        """Whether the row is one of these."""
        return self._rows.get(row.index) is row

    def add(self, row: Row) -> None:
        """A row was admitted."""
        self._rows[row.index] = self._prefill[row.index] = row

    def covered(self, rows: Iterable[Row]) -> None:
        """Steps in flight may cover the caps of these decode rows, or fill their pages."""
        for row in rows:
            if row.wants_decode:
                self._full.append(row)
            else:
                self._leave(row)
                self._covered[row.index] = row

    def recount(self, row: Row, tokens: int) -> None:
        """A committed step gave a row `tokens` tokens, fewer than it may: the row may have some to
        launch again.
        """
        row.recount(tokens)
        if row.wants_decode and self._covered.pop(row.index, None) is not None:
            self._decoding.append(row)
            self._decode = None
            if row.steps_left < 1:
                self._full.append(row)

    def prompt_done(self, row: Row) -> None:
        """The last of a row's prompt was launched: it decodes from the next step on."""
        del self._prefill[row.index]
        if row.wants_decode:
            self._decoding.append(row)
            self._decode = None
            if row.steps_left < 1:
                self._full.append(row)

    def _leave(self, row: Row) -> None:
        place, last = self._decoding.index(row), self._decoding.pop()
        if last is not row:
            self._decoding[place] = last
        self._decode = None

    def finish(self, row: Row, state: RowState = RowState.FINISHED) -> None:
        """A row's sequence ends, or drains; nothing of it is launched any more."""
        row.move(state)
        if row in self._decoding:
            self._leave(row)
        self._prefill.pop(row.index, None)
        self._covered.pop(row.index, None)
        row.join(None)
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
