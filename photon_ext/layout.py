"""The device layouts of csrc/common, for the host side: column numbers, flags, and the packed step input.

One place in Python; ``tests/runtime/test_layout.py`` compares every number with the C++ headers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Meta(IntEnum):
    """Columns of decode_meta, int32 [T, 4]."""

    TOKEN = 0
    POSITION = 1
    LENGTH = 2
    ROW = 3


class SegmentFlag(IntEnum):
    """Bits of the flags column of segments, int32 [R, 4] = (row, first line, number of lines, flags)."""

    SAMPLE = 1
    DRAFT = 2
    STAGED = 4


class RowColumn(IntEnum):
    """Columns of row_state, int32 [rows, ROW_COLUMNS]."""

    LAST_TOKEN = 0
    POSITION = 1
    REMAINING = 2
    ALIVE = 3
    GENERATION = 4
    STOP_COUNT = 5
    TEMPERATURE = 6
    SEED_LOW = 7
    SEED_HIGH = 8
    CONSTRAINT = 9
    LORA_SLOT = 10


class DeltaTable(IntEnum):
    """Which device table a delta run writes."""

    ROW_STATE = 0
    PAGES = 1
    STOP_IDS = 2


class RecordFlag(IntEnum):
    """Bits of the flags column of an output record (row, generation, n_tokens, flags, tokens...)."""

    STOP = 1
    LENGTH = 2
    DEAD = 4
    MASK_ERROR = 8
    NO_CANDIDATE = 16


META_COLUMNS = 4
SEGMENT_COLUMNS = 4
ROW_COLUMNS = 16
RECORD_WIDTH = 8
RECORD_TOKENS = 4
MASK_KEY_COLUMNS = 2
DELTA_HEADER = 4
DELTA_RUN_WORDS = 4
EXTENT_SIZE = 2
HOST_MASK = 1
NO_TOKEN = -(2**31)


class InputLayout(NamedTuple):
    """Where the parts of a slot's packed step input lie, in int32 words: segments, staged ids, deltas.

    The fixed parts come first, so that one copy of a prefix carries whatever changed.
    """

    max_segments: int
    max_lines: int
    delta_words: int

    @property
    def staged_offset(self) -> int:
        return self.max_segments * SEGMENT_COLUMNS

    @property
    def delta_offset(self) -> int:
        return self.staged_offset + -(-self.max_lines // 4) * 4

    @property
    def words(self) -> int:
        return self.delta_offset + self.delta_words


class MaskLayout(NamedTuple):
    """A slot's pinned masks, in int32 words: the keys of all segments, then one bitmask row per segment."""

    max_segments: int
    vocab_size: int

    @property
    def row_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def mask_offset(self) -> int:
        return self.max_segments * MASK_KEY_COLUMNS

    def words(self, segments: int) -> int:
        """Words that a step of ``segments`` segments has to send."""
        return self.mask_offset + segments * self.row_words
