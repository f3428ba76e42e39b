"""The device layouts of csrc/common, for the host side: column numbers, flags, and the packed step
input.

One place in Python; ``tests/runtime/test_layout.py`` compares every number with the C++ headers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Meta(IntEnum):
    """Columns of decode_meta, int32 [T, 4].

    Attributes:
        TOKEN: the id that is fed; FIRST_EMBED - i is the forward's embedding i.
        POSITION: where it stands in its row, and its key and value in the row's pages, from 0 on.
        LENGTH: positions that the token attends to, its own included: POSITION + 1; 0 marks a dead
            token.
        ROW: its row in the tables.
    """

    TOKEN = 0
    POSITION = 1
    LENGTH = 2
    ROW = 3


class SegmentFlag(IntEnum):
    """Bits of the flags column of segments, int32 [R, 4] = (row, first token, number of tokens,
    flags).

    Attributes:
        SAMPLE: the logits of the last token are sampled.
        STAGED: the tokens come from staged_ids; without it the row's last token is fed, in one
            token.
    """

    SAMPLE = 1
    STAGED = 4


class RowColumn(IntEnum):
    """Columns of row_state, int32 [rows, ROW_COLUMNS]; columns without a name are reserved and
    zero.

    Attributes:
        LAST_TOKEN: the token that the next decode step feeds.
        POSITION: where that goes: KV tokens written so far. In a step, until it is published, the
            position of its first token.
        REMAINING: tokens that may still be sampled.
        ALIVE: 1: takes part in steps; 0: ended, or free.
        GENERATION: which lease holds the row; echoed in output records.
        STOP_COUNT: how many leading entries of the row's stop_ids count.
        TEMPERATURE: the bits of a float32; 0 is greedy.
        SEED_LOW, SEED_HIGH: the seed's halves of 32 bits.
        CONSTRAINT: HOST_MASK: sampled with a mask or not at all; 0: free.
        LORA_SLOT: which adapter the row's tokens have, by its slot; 0, or a slot that is not there:
            none.
        TOP_K: not above 0 is off.
        TOP_P: the bits of a float32; off unless above 0 and below 1.
        MIN_P: the bits of a float32; off unless above 0 and at most 1.
        STOP_AFTER: the row's stop ids are suppressed while REMAINING is not below this; 0: never.
        REPETITION_PENALTY: the bits of a float32; 1, or not above 0, is off.
        PRESENCE_PENALTY, FREQUENCY_PENALTY: the bits of a float32; 0 is off.
        BIAS_COUNT: how many leading pairs of the row's biases count.
        ANSWER_BEGIN: staged tokens from this position on are of the answer.
        LOGPROBS: 1 + how many of the likeliest ids get their log-probability; the negative of it:
            of what is sampled of the logits, at the row's temperature; 0: off.
        OBJECT_VALUES: of a spatial answer, how many values make an object: 2 are a point's x and y,
            3 those of a box and its size; 0: the answer is text.
        AUTOMATON: where its automaton begins among the words of all; 0: it has none.
        AUTOMATON_STATE: of it, from 0 on; publish_ advances it.
    """

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
    TOP_K = 11
    TOP_P = 12
    MIN_P = 13
    STOP_AFTER = 14
    REPETITION_PENALTY = 15
    PRESENCE_PENALTY = 16
    FREQUENCY_PENALTY = 17
    BIAS_COUNT = 18
    ANSWER_BEGIN = 19
    LOGPROBS = 20
    OBJECT_VALUES = 21
    AUTOMATON = 24
    AUTOMATON_STATE = 25


class VocabularyWord(IntEnum):
    """Words at the head of the vocabulary's table, at the begin of the automata. Behind them is a
    word for each token, (first byte << 8) | bytes; -1: it ends answers; 0: it has no bytes.

    Attributes:
        TOKENS: how many there are.
        BYTES: where their bytes begin, in words.
    """

    TOKENS = 0
    BYTES = 1
    RESERVED_2 = 2
    RESERVED_3 = 3


class AutomatonWord(IntEnum):
    """Words at the head of an automaton. Behind them are 64 words of the classes of the 256 bytes;
    a word for each state, (mask << 2) | complete << 1 | accepting; its transitions, int32
    [states, classes], -1 for none; and the masks.

    Attributes:
        STATES, CLASSES: sizes of its transitions.
        MASKS, MASK_WORDS: sizes of its masks.
        MASKS_BEGIN: where they begin, in words from its own begin.
        SIZE: words in all.
    """

    STATES = 0
    CLASSES = 1
    MASKS = 2
    MASK_WORDS = 3
    MASKS_BEGIN = 4
    SIZE = 5


class Count(IntEnum):
    """Entries of counts, int32 [COUNTS_SIZE], which the head of a step writes.

    Attributes:
        DECODE_TOKENS: 1 + the last live token that was carried over. In a mixed step, the attention
            of decode tokens takes the tokens below it, the attention of chunks those from it on.
        TOKENS: 1 + the last live token; nobody needs those behind.
        SEGMENTS: 1 + the last live segment that is to be sampled; nobody needs those behind.
    """

    DECODE_TOKENS = 0
    TOKENS = 1
    SEGMENTS = 2


class DeltaTable(IntEnum):
    """Which device table a delta run writes: its place in the list of tables, where extension
    tables follow these. Offsets and counts are int32 words of the table as a flat array.

    Attributes:
        BIASES: pairs of an id and the bits of a float32, ids ascending.
        TOKEN_COUNTS: how often each id is in the row's answer; only of rows with penalties.
        SEEN_BITS: bit (id & 31) of word (id >> 5): the id is in the prompt, or was counted, where a
            count has to have its bit; likewise.
    """

    ROW_STATE = 0
    PAGES = 1
    STOP_IDS = 2
    BIASES = 3
    TOKEN_COUNTS = 4
    SEEN_BITS = 5


class RecordFlag(IntEnum):
    """Bits of the flags column of an output record (row, generation, n_tokens, flags, tokens...).
    The errors are those of row_errors, too.

    Attributes:
        STOP: the token is one of the row's stop ids, also where it is the last that remained.
        LENGTH: it is the last that remained, and no stop id.
        DEAD: the row was not alive, or was ended by the step's head: nothing was sampled.
        MASK_ERROR: the row's mask was missing, or its key names another row or position, or no
            place.
        NO_CANDIDATE: no id could be sampled: the mask allows none, or all logits are NaN or -inf.
        COMPLETE: the row's automaton allows nothing behind the token, and it is no stop id.
        AUTOMATON_ERROR: the row's automaton or its state is none, or does not allow the token.
    """

    STOP = 1
    LENGTH = 2
    DEAD = 4
    MASK_ERROR = 8
    NO_CANDIDATE = 16
    COMPLETE = 32
    AUTOMATON_ERROR = 64


META_COLUMNS = 4
SEGMENT_COLUMNS = 4
ROW_COLUMNS = 32
AUTOMATON_HEADER = 8
LEAST_TABLES = 3
MAX_TABLES = 8
RECORD_WIDTH = 8
RECORD_TOKENS = 4
MOST_LOGPROBS = 20
LOGPROB_WIDTH = 1 + 2 * MOST_LOGPROBS
MASK_KEY_COLUMNS = 3
DELTA_HEADER = 4
DELTA_RUN_WORDS = 4
DELTA_ZEROS = -1
"""Instead of the first payload word of a run: it writes zeros."""
LINK_COLUMNS = 256
LINK_SPARE = 4
COUNTS_SIZE = 3
HOST_MASK = 1
NO_PAGE = -1
"""An entry of a page table that names no page; any other number that is none counts as -1 does."""
NO_TOKEN = -(2**31)
FIRST_EMBED = -2
"""The id of a forward's embedding 0; that of embedding i lies i below."""


class InputLayout(NamedTuple):
    """Where the parts of a slot's packed step input lie, in int32 words: segments, staged ids,
    deltas.

    The fixed parts come first, so that one copy of a prefix carries whatever changed.
    """

    max_segments: int
    max_step_tokens: int
    delta_words: int
    segment_tokens: int = 1

    @property
    def outputs(self) -> OutputLayout:
        """Of the same slot."""
        return OutputLayout(self.max_segments, self.max_step_tokens, self.segment_tokens)

    @property
    def staged_offset(self) -> int:
        return self.max_segments * SEGMENT_COLUMNS

    @property
    def delta_offset(self) -> int:
        return self.staged_offset + -(-self.max_step_tokens // 4) * 4

    @property
    def words(self) -> int:
        return self.delta_offset + self.delta_words


class OutputLayout(NamedTuple):
    """A slot's output, in int32 words: records of all segments, then their log-probabilities (those
    of the first tokens of all, then of the second ones, where a segment may get
    ``segment_tokens``), then those of chunk tokens, so that one copy of a prefix carries the
    records, and the others where a row asks for them.
    """

    max_segments: int
    max_step_tokens: int
    segment_tokens: int = 1

    @property
    def logprob_offset(self) -> int:
        return self.max_segments * RECORD_WIDTH

    def words(self, segments: int, logprobs: bool, scored: int = 0) -> int:
        """Words of a step of ``segments`` segments and ``scored`` tokens with log-probabilities."""
        if not (logprobs or scored):
            return segments * RECORD_WIDTH
        return self.logprob_offset + (segments * self.segment_tokens + scored) * LOGPROB_WIDTH

    @property
    def capacity(self) -> int:
        """Words of the largest step."""
        return self.words(self.max_segments, True, self.max_step_tokens)


class MaskLayout(NamedTuple):
    """A slot's pinned masks, in int32 words: a step's keys, (row, position, place) for each of its
    segments, then the masks that were written for it, in the order of their places from 0 on.

    Both lie together, so that one copy of a prefix carries the keys and no mask but those.
    """

    max_segments: int
    vocab_size: int

    @property
    def row_words(self) -> int:
        return -(-self.vocab_size // 32)

    def mask_offset(self, segments: int) -> int:
        """Where the masks of a step of ``segments`` segments begin."""
        return segments * MASK_KEY_COLUMNS

    def words(self, segments: int, masks: int) -> int:
        """Words that a step of ``segments`` segments has to send, ``masks`` of them masked."""
        return self.mask_offset(segments) + masks * self.row_words

    @property
    def capacity(self) -> int:
        """Words of the largest step, where every segment has a mask."""
        return self.words(self.max_segments, self.max_segments)
