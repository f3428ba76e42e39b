"""A device in a few tokens of Python: the pipeline's port, with a model that is a hash of what lies
in the row's pages.

It follows the step semantics of begin_step_, apply_token_mask_, sample_into and publish_, runs each
step at its launch, and needs neither torch nor a build. A page that is shared, lost or rewritten
changes the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from photon_ext.layout import (
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    HOST_MASK,
    NO_PAGE,
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

NOTHING = 7  # what no tokens are folded to


def folded(tokens: Iterable[int], value: int = NOTHING) -> int:
    """What the scripted model makes of `tokens` after those that came to `value`."""
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def hashed_token(tokens: Sequence[int], vocab: int) -> int:
    """The scripted model: the next token after `tokens`, never 0."""
    return _token(folded(tokens), vocab)


def _token(value: int, vocab: int) -> int:
    return 1 + value % (vocab - 1)


def expected_tokens(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """What the scripted model generates greedily."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(hashed_token(tokens, vocab))
    return tokens[len(prompt) :]


class ScriptedDevice:
    """RuntimePort.

    `on_step` is called at every launch and may raise, to crash the engine loop; `finished` is what
    slots say they are.
    """

    def __init__(
        self,
        max_rows: int = 4,
        max_len: int = 64,
        depth: int = 2,
        page_size: int = 4,
        max_stop_ids: int = 4,
    ) -> None:
        self.depth = depth
        self.max_len = max_len
        self.page_size = page_size
        self.table = RowTable(max_rows, -(-max_len // page_size), max_stop_ids)
        rows = self.table.rows
        self.words = {
            DeltaTable.ROW_STATE: [0] * (rows * ROW_COLUMNS),
            DeltaTable.PAGES: [NO_PAGE] * (rows * self.table.pages_per_row),
            DeltaTable.STOP_IDS: [-1] * (rows * max_stop_ids),
        }
        self.kv: dict[tuple[int, int], int] = {}
        self.captures_prefill = True
        self.vocab = 0
        self.launches = 0
        self.finished = True
        self.on_step: Callable[[], None] = lambda: None

    def open_slots(self, spec: StepSpec) -> Sequence[ScriptedSlot]:
        self.vocab = spec.vocab_size
        return [ScriptedSlot(self) for _ in range(self.depth)]

    def row(self, row: int) -> list[int]:
        return self.words[DeltaTable.ROW_STATE][row * ROW_COLUMNS : (row + 1) * ROW_COLUMNS]

    def set(self, row: int, column: RowColumn, value: int) -> None:
        self.words[DeltaTable.ROW_STATE][row * ROW_COLUMNS + column] = value

    def apply(self, deltas: Sequence[int]) -> None:
        for run in range(deltas[0] if deltas else 0):
            at = DELTA_HEADER + run * DELTA_RUN_WORDS
            table, offset, count, source = deltas[at : at + DELTA_RUN_WORDS]
            self.words[DeltaTable(table)][offset : offset + count] = deltas[source : source + count]

    def cell(self, row: int, position: int) -> tuple[int, int]:
        page = self.words[DeltaTable.PAGES][
            row * self.table.pages_per_row + position // self.page_size
        ]
        assert page >= 0, f"row {row} has no page for position {position}"
        return page, position % self.page_size

    def history(self, row: int, length: int) -> list[int]:
        return [self.kv[self.cell(row, position)] for position in range(length)]

    def folded(self, row: int, length: int) -> int:
        """What the row's first tokens are folded to."""
        return folded(self.history(row, length))

    def stops(self, row: int) -> list[int]:
        start = row * self.table.max_stop_ids
        return self.words[DeltaTable.STOP_IDS][start : start + self.row(row)[RowColumn.STOP_COUNT]]


class ScriptedSlot:
    """SlotPort."""

    span = None

    def __init__(self, device: ScriptedDevice) -> None:
        self._device = device
        self._segments: list[list[int]] = []
        self._masks: dict[int, tuple[int, int, memoryview]] = {}
        self._records: list[int] = []

    def launch(
        self,
        key: StepKey,
        segments: Sequence[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
    ) -> int:
        device = self._device
        device.on_step()
        device.launches += 1
        device.apply(deltas)
        self._masks.clear()
        self._segments = [list(segments[i : i + 4]) for i in range(0, len(segments), 4)]
        for row, first, count, flags in self._segments:
            state = device.row(row)
            if not state[RowColumn.ALIVE]:
                continue
            tokens = (
                staged[first : first + count]
                if flags & SegmentFlag.STAGED
                else [state[RowColumn.LAST_TOKEN]]
            )
            for i, token in enumerate(tokens):
                device.kv[device.cell(row, state[RowColumn.POSITION] + i)] = token
        if finish:
            self.finalize(key)
        return len(staged) + len(deltas)

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None:
        words = memoryview(bytearray(4 * -(-self._device.vocab // 32))).cast("i")
        fill(row, words)
        self._masks[index] = (row.index, position, words)

    def finalize(self, key: StepKey) -> None:
        self._records = [
            word
            for index, segment in enumerate(self._segments)
            for word in self._publish(index, *segment)
        ]

    def done(self) -> bool:
        return self._device.finished

    def wait(self, segments: int) -> Sequence[int]:
        return self._records[: segments * RECORD_WIDTH]

    def clear_keys(self) -> None:
        self._masks.clear()

    def _publish(self, index: int, row: int, first: int, count: int, flags: int) -> list[int]:
        device, state = self._device, self._device.row(row)
        generation = state[RowColumn.GENERATION]
        if not state[RowColumn.ALIVE]:
            return _record(row, generation, RecordFlag.DEAD)
        length = state[RowColumn.POSITION] + count
        device.set(row, RowColumn.POSITION, length)
        if not flags & SegmentFlag.SAMPLE:
            return _record(row, generation, 0)
        token, error = self._sample(index, row, length)
        if token is None:
            device.set(row, RowColumn.ALIVE, 0)
            return _record(row, generation, error)
        remaining = state[RowColumn.REMAINING] - 1
        device.set(row, RowColumn.LAST_TOKEN, token)
        device.set(row, RowColumn.REMAINING, remaining)
        verdict = (
            RecordFlag.STOP
            if token in device.stops(row)
            else RecordFlag.LENGTH
            if remaining <= 0
            else 0
        )
        if verdict:
            device.set(row, RowColumn.ALIVE, 0)
        return _record(row, generation, verdict, token)

    def _sample(self, index: int, row: int, length: int) -> tuple[int | None, int]:
        device, state = self._device, self._device.row(row)
        value = device.folded(row, length)
        if state[RowColumn.TEMPERATURE]:
            temperature = struct.unpack("<f", struct.pack("<i", state[RowColumn.TEMPERATURE]))[0]
            value = folded([state[RowColumn.SEED_LOW], int(temperature * 1000)], value)
        token = _token(value, device.vocab)
        if state[RowColumn.CONSTRAINT] != HOST_MASK:
            return token, 0
        if index not in self._masks or self._masks[index][:2] != (row, length - 1):
            return None, RecordFlag.MASK_ERROR
        words = self._masks[index][2]
        allowed = [i for i in range(device.vocab) if words[i >> 5] >> (i & 31) & 1]
        if not allowed:
            return None, RecordFlag.NO_CANDIDATE
        return allowed[token % len(allowed)], 0


def _record(row: int, generation: int, flags: int, token: int | None = None) -> list[int]:
    words = [row, generation, int(token is not None), int(flags)] + [-1] * (RECORD_WIDTH - 4)
    if token is not None:
        words[4] = token
    return words
