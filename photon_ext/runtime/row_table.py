"""The host side of the device tables: which rows are free, and the words to write next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from photon_ext.checks import INT32_MAX
from photon_ext.errors import ConfigError, NoFreeRow
from photon_ext.layout import (
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    DELTA_ZEROS,
    NO_PAGE,
    ROW_COLUMNS,
    DeltaTable,
    RowColumn,
)

RUN_WORDS = 8192  # that neighbours make together at most: a run is written by one warp


class RowTable:
    """Free rows, their generations, and pending deltas: what the compute stream, which alone writes
    the device tables, writes with the next launch.

    A later delta for the same word replaces an earlier one that was not sent yet. Words are kept by
    the run, never one by one: a row may have thousands of them. Not thread-safe. Methods trust what
    they are given: a row that ``acquire`` gave, released once, no more words than its tables have.

    Args:
        max_rows: live sequences at most; row 0 is padding, so tables have ``max_rows + 1`` rows.
        pages_per_row, max_stop_ids: widths of ``page_table`` and ``stop_ids``.
        max_biases: logit biases that a row can have.
        penalty_vocab: ids that rows with penalties count; 0: no row has any.

    Raises:
        ConfigError: the tables have more words than int32 offsets reach.
    """

    def __init__(
        self,
        max_rows: int,
        pages_per_row: int,
        max_stop_ids: int,
        max_biases: int = 0,
        penalty_vocab: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.pages_per_row = pages_per_row
        self.max_stop_ids = max_stop_ids
        self.max_biases = max_biases
        self.penalty_vocab = penalty_vocab
        words = max(self.delta_capacity, self.rows * max(self.widths))
        if words > INT32_MAX:
            raise ConfigError(
                f"max_rows {max_rows}, each with {pages_per_row} pages, max_stop_ids "
                f"{max_stop_ids} and penalty_vocab {penalty_vocab}, make tables of {words} words, "
                f"and the device counts to {INT32_MAX}; make one of them smaller, or page_size "
                "larger"
            )
        self._free = deque(range(1, max_rows + 1))
        self._generation = [0] * (max_rows + 1)
        # words by (table, offset); no word is in two of them
        self._pending: dict[tuple[int, int], list[int]] = {}
        self._pages_at: dict[int, int] = {}  # where a row's pending pages begin, within the row
        self._uncounted: set[int] = set()  # rows whose token counts are to be zero

    @property
    def rows(self) -> int:
        """Rows of the device tables, the padding row included."""
        return self.max_rows + 1

    @property
    def free_rows(self) -> int:
        """Rows that ``acquire`` could take now."""
        return len(self._free)

    @property
    def widths(self) -> tuple[int, ...]:
        """Words of a row in each table, in the order of layout.DeltaTable."""
        vocab = self.penalty_vocab
        pages, stops, biases = self.pages_per_row, self.max_stop_ids, 2 * self.max_biases
        return ROW_COLUMNS, pages, stops, biases, vocab, -(-vocab // 32)

    @property
    def delta_capacity(self) -> int:
        """Words that the largest packet of deltas takes: every row rewritten, a run per table, and
        those that clear its counts.
        """
        words = sum(self.widths) - self.widths[DeltaTable.TOKEN_COUNTS]
        runs = len(DeltaTable) + -(-self.penalty_vocab // RUN_WORDS)
        return DELTA_HEADER + self.rows * (words + runs * DELTA_RUN_WORDS)

    def acquire(self) -> tuple[int, int]:
        """Takes a free row; returns (row, generation), both from 1 on. Raises NoFreeRow."""
        if not self._free:
            remedy = "wait for one to be released, or build the runtime with more max_rows"
            raise NoFreeRow(f"all {self.max_rows} rows are in use; {remedy}")
        row = self._free.popleft()
        self._generation[row] += 1
        return row, self._generation[row]

    def release(self, row: int) -> None:
        """Gives a row back; its device state is left as it is, dead."""
        self._free.append(row)

    def write_row(
        self, row: int, state: Sequence[int], pages: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """Replaces everything the device knows about ``row``: its 32 words of ``state``
        (layout.RowColumn), its pages and its stop ids, each filled up with -1.
        """
        pending, width, ids = self._pending, self.pages_per_row, self.max_stop_ids
        pending.pop(_alive(row), None)
        # those appended to a row that has left without another launch
        pending.pop((DeltaTable.PAGES, row * width + self._pages_at.get(row, 0)), None)
        self._pages_at[row] = 0
        pending[_state(row)] = list(state)
        pending[DeltaTable.PAGES, row * width] = [*pages, *[NO_PAGE] * (width - len(pages))]
        pending[DeltaTable.STOP_IDS, row * ids] = [*stop_ids, *[-1] * (ids - len(stop_ids))]

    def write_bias(self, row: int, words: Sequence[int]) -> None:
        """Gives ``row`` its logit biases (row_words.bias_words), after `write_row`."""
        self._pending[DeltaTable.BIASES, row * self.widths[DeltaTable.BIASES]] = list(words)

    def count_from(self, row: int, prompt: Sequence[int]) -> None:
        """The tokens of ``row`` are counted from here on, for penalties, after `write_row`;
        ``prompt``: its prompt bits (row_words.prompt_bits).
        """
        self._pending[DeltaTable.SEEN_BITS, row * self.widths[DeltaTable.SEEN_BITS]] = list(prompt)
        self._uncounted.add(row)

    def append_pages(self, row: int, held: int, pages: Sequence[int]) -> None:
        """``row``, which holds ``held`` pages, gets these besides."""
        begin = self._pages_at.setdefault(row, held)
        key = DeltaTable.PAGES, row * self.pages_per_row + begin
        self._pending.setdefault(key, [])[held - begin : held - begin + len(pages)] = pages

    def kill(self, row: int) -> None:
        """Makes ``row`` dead from the next launch on."""
        if (state := self._pending.get(_state(row))) is not None:
            state[RowColumn.ALIVE] = 0
        else:
            self._pending[_alive(row)] = [0]

    def take_deltas(self) -> list[int]:
        """The pending deltas as one packet of int32 words (csrc/common/row_state.h), and forgets
        them. Empty when there are none.
        """
        if not self._pending:
            return []
        runs: list[list[int]] = []
        payload: list[int] = []
        for (table, offset), words in sorted(self._pending.items()):
            follows = runs and (table, offset) == (runs[-1][0], runs[-1][1] + runs[-1][2])
            if not follows or runs[-1][2] + len(words) > RUN_WORDS:
                runs.append([int(table), offset, 0, len(payload)])
            runs[-1][2] += len(words)
            payload += words
        cleared = self._clear_counts()
        self._pending.clear()
        self._pages_at.clear()
        base = DELTA_HEADER + DELTA_RUN_WORDS * len(runs) + len(cleared)
        count = len(runs) + len(cleared) // DELTA_RUN_WORDS
        packet = [count, base + len(payload), 0, 0]
        for table, offset, count, start in runs:
            packet += (table, offset, count, base + start)
        return packet + cleared + payload

    def _clear_counts(self) -> list[int]:
        """Runs of zeros, several for each row, so that several warps write them."""
        runs: list[int] = []
        for row in self._uncounted:
            begin = row * self.penalty_vocab
            for at in range(begin, begin + self.penalty_vocab, RUN_WORDS):
                count = min(RUN_WORDS, begin + self.penalty_vocab - at)
                runs += (DeltaTable.TOKEN_COUNTS, at, count, DELTA_ZEROS)
        self._uncounted.clear()
        return runs


def _state(row: int) -> tuple[int, int]:
    return DeltaTable.ROW_STATE, row * ROW_COLUMNS


def _alive(row: int) -> tuple[int, int]:
    return DeltaTable.ROW_STATE, row * ROW_COLUMNS + RowColumn.ALIVE
