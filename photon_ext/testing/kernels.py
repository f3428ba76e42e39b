"""The kernels of a step on the simulated device: what csrc/ops defines, on lists, each declaring
what it reads and writes.

Ranges: ("row", r) the words of a row in the tables; ("lease", r) the right to use them, which
release takes away; ("page", p); ("input", s), ("mask", s), ("records", s) of slot s; "decode_meta",
"logits", "sampled" shared by all steps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from photon_ext.layout import (
    COUNTS_SIZE,
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    HOST_MASK,
    MASK_KEY_COLUMNS,
    NO_TOKEN,
    RECORD_WIDTH,
    SEGMENT_COLUMNS,
    Count,
    InputLayout,
    MaskLayout,
    RecordFlag,
    RowColumn,
    SegmentFlag,
)
from photon_ext.runtime.step import StepKey
from photon_ext.testing.errors import SimOverwrite
from photon_ext.testing.faults import Fault
from photon_ext.testing.memory import Access
from photon_ext.testing.model import ToyModel, pick
from photon_ext.testing.state import DeviceState, SlotState, clean

DEAD_TOKEN = (0, 0, 0, 0)
INT32_MAX = 2**31 - 1
SAMPLE, STAGED = int(SegmentFlag.SAMPLE), int(SegmentFlag.STAGED)


class _Segment(NamedTuple):
    row: int
    first: int
    num_tokens: int
    flags: int


class StepKernels:
    """The kernels of one slot."""

    def __init__(
        self,
        index: int,
        device: DeviceState,
        slot: SlotState,
        inputs: InputLayout,
        masks: MaskLayout,
        model: ToyModel,
        fault: Fault | None,
    ) -> None:
        self._index = index
        self._device = device
        self._slot = slot
        self._inputs = inputs
        self._masks = masks
        self._model = model
        self._fault = fault

    def forward(self, key: StepKey, launch: int, access: Access) -> None:
        """Head and forward of launch number ``launch``."""
        self.begin_step(key, access)
        self._run_model(key, launch, access)

    def sampling(self, key: StepKey, launch: int, access: Access) -> None:
        """Masks (of a split step), sampling and publish of launch number ``launch``."""
        access.read("logits")
        access.read("input", self._index)
        if self._device.logits_of != launch:
            raise SimOverwrite(
                f"{access.label!r} finds the logits of launch {self._device.logits_of} (I11)"
            )
        self._apply_masks(key, access)
        self._sample(key, access)
        self._publish(key, access)

    def begin_step(self, key: StepKey, access: Access) -> None:
        """The head of a forward: deltas, carry-over, decode_meta."""
        self.apply_deltas(access)
        self._fill_meta(key, access)

    # --- head -------------------------------------------------------------------------------------

    def apply_deltas(self, access: Access) -> None:
        """Applies the slot's delta runs to the tables and consumes them."""
        access.write("input", self._index)
        packet = self._slot.input[self._inputs.delta_offset :]
        runs = clean(packet[0], "the number of delta runs") if packet else 0
        if runs == 0:
            return
        for run in range(runs):
            at = DELTA_HEADER + run * DELTA_RUN_WORDS
            if at + DELTA_RUN_WORDS <= len(packet):
                self._apply_run(access, packet, *packet[at : at + DELTA_RUN_WORDS])
        if self._fault is not Fault.STALE_DELTAS:
            self._slot.input[self._inputs.delta_offset] = 0

    def _apply_run(
        self, access: Access, packet: list[int], table: int, offset: int, count: int, source: int
    ) -> None:
        tables = (self._device.row_state, self._device.page_table, self._device.stop_ids)
        if not 0 <= table < len(tables):
            return
        rows = tables[table]
        width = len(rows[0])
        if (
            count < 0
            or not 0 <= offset <= len(rows) * width - count
            or not 0 <= source <= len(packet) - count
        ):
            return
        for row in range(offset // width, -(-(offset + count) // width)):
            access.write("row", row)
        for i in range(count):
            rows[(offset + i) // width][(offset + i) % width] = clean(
                packet[source + i], "a delta word"
            )

    def _fill_meta(self, key: StepKey, access: Access) -> None:
        access.write("decode_meta")
        meta = [DEAD_TOKEN] * key.num_tokens
        counts = [0] * COUNTS_SIZE
        for index, segment in self._live_segments(key, access):
            access.write("lease", segment.row)
            state = self._device.row_state[segment.row]
            position = state[RowColumn.POSITION]
            tokens = self._take_tokens(segment, key.num_tokens)
            if NO_TOKEN in tokens:
                access.write("row", segment.row)
                state[RowColumn.ALIVE] = 0
                continue
            for i, token in enumerate(tokens):
                meta[segment.first + i] = (token, position + i, position + i + 1, segment.row)
            end = segment.first + segment.num_tokens
            if not segment.flags & STAGED:
                counts[Count.DECODE_TOKENS] = max(counts[Count.DECODE_TOKENS], end)
            counts[Count.TOKENS] = max(counts[Count.TOKENS], end)
            if segment.flags & SAMPLE:
                counts[Count.SEGMENTS] = max(counts[Count.SEGMENTS], index + 1)
        self._device.decode_meta = meta
        self._device.counts = counts

    def _take_tokens(self, segment: _Segment, num_tokens: int) -> list[int]:
        """The tokens of a live row's segment, those that were staged consumed; NO_TOKEN alone
        where it does not fit step or row.
        """
        state = self._device.row_state[segment.row]
        fits = (
            segment.num_tokens > 0
            and segment.first >= 0
            and segment.first + segment.num_tokens <= num_tokens
        )
        if not fits or not 0 <= state[RowColumn.POSITION] <= INT32_MAX - segment.num_tokens:
            return [NO_TOKEN]
        if not segment.flags & STAGED:
            return [state[RowColumn.LAST_TOKEN] if segment.num_tokens == 1 else NO_TOKEN]
        start = self._inputs.staged_offset + segment.first
        places = slice(start, start + segment.num_tokens)
        tokens = [
            clean(token, f"a staged id of tokens {segment.first}+ of slot {self._index}")
            for token in self._slot.input[places]
        ]
        if self._fault is not Fault.STAGED_REUSED:
            self._slot.input[places] = [NO_TOKEN] * segment.num_tokens
        return tokens

    # --- forward ----------------------------------------------------------------------------------

    def _run_model(self, key: StepKey, launch: int, access: Access) -> None:
        device = self._device
        access.read("decode_meta")
        access.write("logits")
        for token, position, length, row in device.decode_meta:
            if length:
                access.write("page", device.store(row, position, token))
        logits: list[list[float]] = [[] for _ in range(key.segments)]
        for index, segment in self._live_segments(key, access):
            if not segment.flags & SAMPLE:
                continue
            length, row = device.decode_meta[segment.first + segment.num_tokens - 1][2:]
            for start in range(0, length, device.page_size):
                access.read("page", device.page_of(row, start))
            logits[index] = self._model.logits(device.context(row, length))
        device.logits, device.logits_of = logits, launch

    # --- sampling ---------------------------------------------------------------------------------

    def _apply_masks(self, key: StepKey, access: Access) -> None:
        device = self._device
        access.write("row_errors")
        device.row_errors = [0] * key.segments
        if not key.split:
            return
        access.read("mask", self._index)
        for index, segment in self._live_segments(key, access):
            if not segment.flags & SAMPLE:
                continue
            state = device.row_state[segment.row]
            at = index * MASK_KEY_COLUMNS
            row, position = self._slot.mask[at : at + MASK_KEY_COLUMNS]
            if row == 0:
                device.row_errors[index] = (
                    RecordFlag.MASK_ERROR if state[RowColumn.CONSTRAINT] == HOST_MASK else 0
                )
            elif (row, position) == (
                segment.row,
                state[RowColumn.POSITION] + segment.num_tokens - 1,
            ):
                device.logits[index] = self._masked(device.logits[index], index)
            else:
                device.row_errors[index] = RecordFlag.MASK_ERROR

    def _masked(self, logits: list[float], index: int) -> list[float]:
        start = self._masks.mask_offset + index * self._masks.row_words
        words = self._slot.mask[start : start + self._masks.row_words]
        return [
            value if words[i >> 5] >> (i & 31) & 1 else -math.inf for i, value in enumerate(logits)
        ]

    def _sample(self, key: StepKey, access: Access) -> None:
        device = self._device
        access.write("sampled")
        device.sampled = [-1] * key.segments
        for index, segment in self._live_segments(key, access):
            if not segment.flags & SAMPLE or device.row_errors[index]:
                continue
            state = device.row_state[segment.row]
            temperature: float = struct.unpack(
                "<f", struct.pack("<i", state[RowColumn.TEMPERATURE])
            )[0]
            position = state[RowColumn.POSITION] + segment.num_tokens - 1
            seeds = state[RowColumn.SEED_LOW], state[RowColumn.SEED_HIGH]
            token = pick(device.logits[index], temperature, *seeds, position)
            device.sampled[index] = token
            if token < 0:
                device.row_errors[index] |= RecordFlag.NO_CANDIDATE

    def _publish(self, key: StepKey, access: Access) -> None:
        access.write("records", self._index)
        live = dict(self._live_segments(key, access))
        for index in range(key.segments):
            segment = live.get(index)
            words = (
                self._dead_record(index)
                if segment is None
                else self._publish_row(index, segment, access)
            )
            padded = [*words, *([-1] * (RECORD_WIDTH - len(words)))]
            self._slot.records[index * RECORD_WIDTH : (index + 1) * RECORD_WIDTH] = padded

    def _dead_record(self, index: int) -> list[int]:
        row = self._segment(index).row
        known = 0 < row < len(self._device.row_state)
        generation = self._device.row_state[row][RowColumn.GENERATION] if known else 0
        return [row, generation, 0, RecordFlag.DEAD, -1]

    def _publish_row(self, index: int, segment: _Segment, access: Access) -> list[int]:
        device = self._device
        access.write("row", segment.row)
        access.write("lease", segment.row)
        state = device.row_state[segment.row]
        generation = state[RowColumn.GENERATION]
        state[RowColumn.POSITION] += segment.num_tokens
        if not segment.flags & SAMPLE:
            return [segment.row, generation, 0, 0, -1]
        token, errors = device.sampled[index], device.row_errors[index]
        if errors or token < 0:
            state[RowColumn.ALIVE] = 0
            return [segment.row, generation, 0, errors or RecordFlag.NO_CANDIDATE, -1]
        state[RowColumn.LAST_TOKEN] = token
        state[RowColumn.REMAINING] -= 1
        flags = 0
        if token in device.stop_ids[segment.row][: state[RowColumn.STOP_COUNT]]:
            flags = int(RecordFlag.STOP)
        elif state[RowColumn.REMAINING] <= 0:
            flags = int(RecordFlag.LENGTH)
        if flags:
            state[RowColumn.ALIVE] = 0
        return [segment.row, generation, 1, flags, token]

    # --- segments ---------------------------------------------------------------------------------

    def _segment(self, index: int) -> _Segment:
        start = index * SEGMENT_COLUMNS
        return _Segment(*self._slot.input[start : start + SEGMENT_COLUMNS])

    def _live_segments(self, key: StepKey, access: Access) -> Iterator[tuple[int, _Segment]]:
        rows = self._device.row_state
        for index in range(key.segments):
            segment = self._segment(index)
            if 0 < segment.row < len(rows):
                access.read("row", segment.row)
                if clean(rows[segment.row][RowColumn.ALIVE], f"row {segment.row}"):
                    yield index, segment
