"""A device that computes nothing, for measuring what the host does in a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from photon_ext import layout
from photon_ext.layout import RECORD_WIDTH, ROW_COLUMNS, RowColumn
from photon_ext.runtime.arguments import checked_capacity
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row import Row
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import Fill, StepKey

TOKEN = 5


class StubDevice:
    """A RuntimePort whose steps are done at once: every sampled segment gets token 5, whatever its
    mask, and a row ends at its cap alone. The sizes are those of Runtime.
    """

    captures_prefill = True

    def __init__(
        self, max_rows: int = 32, max_len: int = 4096, depth: int = 2, page_size: int = 16
    ) -> None:
        size = checked_capacity(max_rows, max_len, depth, page_size, 16)
        self.depth, self.max_len, self.page_size = size.depth, size.max_len, size.page_size
        self.table = RowTable(size.max_rows, size.pages_per_row, size.max_stop_ids)
        self.row_state = [0] * (self.table.rows * ROW_COLUMNS)

    def open_slots(self, spec: StepSpec) -> Sequence[StubSlot]:
        """See RuntimePort.open_slots."""
        return [StubSlot(self.row_state, spec.vocab_size) for _ in range(self.depth)]


class StubSlot:
    """A SlotPort that answers with tokens for its segments."""

    span = None

    def __init__(self, row_state: list[int], vocab_size: int) -> None:
        self._rows, self._segments = row_state, list[int]()
        self._mask = array("i", bytes(4 * -(-vocab_size // 32)))

    def launch(
        self, key: StepKey, segments: Sequence[int], staged: Sequence[int], *rest: Sequence[int]
    ) -> int:
        """See SlotPort.launch: notes the segments, and the state of rows that are new."""
        deltas = rest[0]
        for run in range(deltas[0] if deltas else 0):
            at = layout.DELTA_HEADER + layout.DELTA_RUN_WORDS * run
            table, offset, count, source = deltas[at : at + layout.DELTA_RUN_WORDS]
            if table == layout.DeltaTable.ROW_STATE:
                self._rows[offset : offset + count] = deltas[source : source + count]
        self._segments = list(segments)
        return len(staged) + len(deltas)

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None:
        fill(row, memoryview(self._mask))

    def finalize(self, key: StepKey) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self, segments: int) -> Sequence[int]:
        words, rows = [-1] * (segments * RECORD_WIDTH), self._rows
        for i in range(segments):
            row, _, _, flags = self._segments[4 * i : 4 * i + 4]
            state, sampled = row * ROW_COLUMNS, flags & layout.SegmentFlag.SAMPLE
            rows[state + RowColumn.REMAINING] -= sampled
            ends = sampled and rows[state + RowColumn.REMAINING] <= 0
            verdict = layout.RecordFlag.LENGTH if ends else 0
            at, generation = i * RECORD_WIDTH, rows[state + RowColumn.GENERATION]
            words[at : at + 5] = (row, generation, sampled, verdict, TOKEN)
        return words
