"""A runtime that computes nothing: what a step costs the host is all that it costs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from photon_ext.layout import (
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    RECORD_WIDTH,
    ROW_COLUMNS,
    SEGMENT_COLUMNS,
    DeltaTable,
    RecordFlag,
    RowColumn,
    SegmentFlag,
)
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row import Row
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import Fill, StepKey


class StubRuntime:
    """A RuntimePort whose rows sample token 5 until their caps; constraints are not asked.

    A step like the one before it is answered with the same records.
    """

    def __init__(
        self, max_rows: int, max_len: int = 4096, depth: int = 2, page_size: int = 16
    ) -> None:
        self.depth, self.max_len, self.page_size = depth, max_len, page_size
        self.captures_prefill = True
        self.table = RowTable(max_rows, -(-max_len // page_size), 16)
        self.state = array("i", bytes(4 * ROW_COLUMNS * (max_rows + 1)))
        self._segments: array[int] = array("i")
        self._records = memoryview(array("i"))
        self._quiet, self._left = 0, 0  # steps with these records since, and until a row's cap

    def open_slots(self, spec: StepSpec) -> Sequence[StubSlot]:
        """See RuntimePort.open_slots."""
        return [StubSlot(self) for _ in range(self.depth)]

    def step(self, segments: array[int], deltas: Sequence[int]) -> memoryview:
        """The records of a step."""
        self._quiet += 1
        if segments is not self._segments or deltas or self._quiet >= self._left - 1:
            self._run(segments, deltas)
        return self._records

    def _run(self, segments: array[int], deltas: Sequence[int]) -> None:
        for i in range(0, len(self._segments), SEGMENT_COLUMNS):
            if self._segments[i + 3] & SegmentFlag.SAMPLE:
                remaining = self._segments[i] * ROW_COLUMNS + RowColumn.REMAINING
                self.state[remaining] -= self._quiet
        for run in range(deltas[0] if deltas else 0):
            at = DELTA_HEADER + run * DELTA_RUN_WORDS
            table, offset, count, start = deltas[at : at + DELTA_RUN_WORDS]
            if table == DeltaTable.ROW_STATE:
                self.state[offset : offset + count] = array("i", deltas[start : start + count])
        self._segments, self._quiet, lefts = segments, 0, []
        records = array("i", [-1]) * (len(segments) // SEGMENT_COLUMNS * RECORD_WIDTH)
        for i in range(0, len(segments), SEGMENT_COLUMNS):
            row = self.state[segments[i] * ROW_COLUMNS : (segments[i] + 1) * ROW_COLUMNS]
            flags, left = 0, row[RowColumn.REMAINING]
            if segments[i] == 0 or left <= 0:
                flags = RecordFlag.DEAD
            elif segments[i + 3] & SegmentFlag.SAMPLE:
                flags = RecordFlag.LENGTH if left == 1 else 0
                lefts.append(left)
            record = (segments[i], row[RowColumn.GENERATION], int(flags == 0), flags, 5)
            begin = i // SEGMENT_COLUMNS * RECORD_WIDTH
            records[begin : begin + len(record)] = array("i", record)
        self._records, self._left = memoryview(records), min(lefts, default=1)
        self._quiet = 0


class StubSlot:
    """A SlotPort that is done at once."""

    span = None

    def __init__(self, runtime: StubRuntime) -> None:
        self._runtime = runtime
        self._records = memoryview(array("i"))

    def launch(
        self,
        key: StepKey,
        segments: array[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
    ) -> int:
        """See SlotPort.launch."""
        self._records = self._runtime.step(segments, deltas)
        return len(deltas) + len(staged)

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None:
        """See SlotPort.write_mask."""

    def finalize(self, key: StepKey) -> None:
        """See SlotPort.finalize."""

    def done(self) -> bool:
        """See SlotPort.done."""
        return True

    def wait(self, segments: int) -> memoryview:
        """See SlotPort.wait."""
        return self._records
