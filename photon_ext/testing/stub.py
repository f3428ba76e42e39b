"""A device that computes nothing, for measuring what the host does in a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from photon_ext.checks import check_capacity
from photon_ext.layout import (
    DELTA_HEADER,
    RECORD_WIDTH,
    ROW_COLUMNS,
    DeltaTable,
    RecordFlag,
    RowColumn,
    SegmentFlag,
)
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row import Row
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import Fill, StepKey

if TYPE_CHECKING:
    import torch


class StubDevice:
    """A RuntimePort whose steps are done at once: every sampled segment gets token 5, whatever its
    mask, and a row ends at its cap alone. A step like the last one gets the same records again.
    """

    captures_prefill = True
    step_tokens = 1
    automaton_words = 0

    def __init__(self, max_rows: int, max_len: int = 4096, depth: int = 2, page_size: int = 16):
        size = check_capacity(max_rows, max_len, depth, page_size, 16)
        self.depth, self.max_len, self.page_size = size.depth, size.max_len, size.page_size
        self.table = RowTable(size.max_rows, size.pages_per_row, size.max_stop_ids)
        self._rows = array("i", bytes(4 * ROW_COLUMNS * self.table.rows))
        self._segments, self._records = array("i"), memoryview(array("i"))
        self._sampled: list[int] = []  # where the rows of the latest segments count what remains
        self._again, self._quiet = 0, 0  # steps that had these records, and that may still have

    def write_automaton(self, offset: int, words: object) -> None: ...

    def open_slots(self, spec: StepSpec) -> Sequence[StubSlot]:
        return [StubSlot(self) for _ in range(self.depth)]

    def upload(self, to: torch.Tensor, rows: torch.Tensor) -> None: ...

    def run(self, segments: array[int], deltas: Sequence[int]) -> memoryview:
        self._again += 1
        if segments is self._segments and not deltas and self._again < self._quiet:
            return self._records
        for at in self._sampled:
            self._rows[at] -= self._again
        for begin in range(DELTA_HEADER, DELTA_HEADER + 4 * sum(deltas[:1]), 4):
            table, offset, count, source = deltas[begin : begin + 4]
            if table == DeltaTable.ROW_STATE:
                self._rows[offset : offset + count] = array("i", deltas[source : source + count])
        self._segments, self._sampled, self._again, records = segments, [], 0, array("i")
        for row, _, _, flags in zip(*[iter(segments)] * 4, strict=True):
            remaining, sampled = row * ROW_COLUMNS + RowColumn.REMAINING, flags & SegmentFlag.SAMPLE
            left, generation = self._rows[remaining], row * ROW_COLUMNS + RowColumn.GENERATION
            verdict = RecordFlag.DEAD if left <= 0 else RecordFlag.LENGTH * (sampled * left == 1)
            self._sampled += [remaining] * (sampled and left > 0)
            record = [row, self._rows[generation], sampled, verdict, 5]
            records.extend(record + [-1] * (RECORD_WIDTH - len(record)))
        self._quiet = min((self._rows[at] for at in self._sampled), default=1) - 1
        self._records = memoryview(records)
        return self._records


class StubSlot:
    span = None

    def __init__(self, device: StubDevice) -> None:
        self._device, self._records = device, memoryview(array("i"))

    def launch(
        self,
        key: StepKey,
        segments: array[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        *_: Any,
    ) -> int:
        self._records = self._device.run(segments, deltas)
        return len(staged) + len(deltas)

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None: ...

    def finalize(self, key: StepKey) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self, segments: int) -> memoryview:
        return self._records
