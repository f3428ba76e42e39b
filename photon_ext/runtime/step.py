"""What crosses the stream boundary: plans, steps, and what a commit reports."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from photon_ext.runtime.step_features import StepFeatures

if TYPE_CHECKING:
    import torch

    from photon_ext._C import Event
    from photon_ext.runtime.decode_batch import DecodeBatch
    from photon_ext.runtime.row import Row


class StepKind(Enum):
    """A decode step has a token per row, a prefill step chunks of prompts, a mixed step both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class FinishReason(Enum):
    """Why a row ended. Commits report a stop id, the cap and errors, and nothing after an abort."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class Chunk(NamedTuple):
    """The next ``num_tokens`` tokens of a row's prompt."""

    row: Row
    num_tokens: int


class PageAppend(NamedTuple):
    """KV pages that a row gets behind those it has, different from each other and from them."""

    row: Row
    pages: tuple[int, ...]


class StepPlan(NamedTuple):
    """Who is scheduled in a step: the rows of ``decode``, then chunks of prompts.
    Before it the rows of ``drains`` leave (Pipeline.drain), and others get more pages.

    While nobody joins, leaves or ends, a planner gives the same tuple ``decode`` again: the step
    then costs the host no work per row.
    """

    decode: tuple[Row, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    appends: tuple[PageAppend, ...] = ()
    drains: tuple[Row, ...] = ()


class StepKey(NamedTuple):
    """What a captured graph depends on; everything else that a kernel needs is on the device (I10).

    Attributes:
        decode_rows: leading tokens and segments for decode rows, padding included.
        chunk_tokens, chunks: tokens and segments for chunks, padding included.
        split: sampled late, by `Pipeline.finalize`, because a row waits for a host mask.
        features: what its rows ask for.
        scored: a prompt gets log-probabilities; never captured.
    """

    decode_rows: int
    chunk_tokens: int
    chunks: int
    split: bool
    features: StepFeatures = StepFeatures.NONE
    scored: bool = False

    @property
    def num_tokens(self) -> int:
        """T, tokens of the step."""
        return self.decode_rows + self.chunk_tokens

    @property
    def segments(self) -> int:
        """R, segments of the step: those of decode rows, then those of chunks."""
        return self.decode_rows + self.chunks

    @property
    def kind(self) -> StepKind:
        """Which parts the step has."""
        if self.chunk_tokens == 0:
            return StepKind.DECODE
        return StepKind.MIXED if self.decode_rows else StepKind.PREFILL


class ChunkSegment(NamedTuple):
    """A chunk as it was launched: ``num_tokens`` prompt tokens of ``row`` from ``position`` on.
    With ``sample`` it ends its prompt, and a token is sampled from its last token's logits.
    """

    row: Row
    position: int
    num_tokens: int
    sample: bool


class Span(NamedTuple):
    """First and last moment of a step on the compute stream; readable once it is committed and
    until its slot is launched twice more.
    """

    begin: Event
    end: Event

    def length_us(self) -> float:
        """Microseconds from the first moment to the last."""
        return self.end.elapsed_ms(self.begin) * 1e3

    def gap_us(self, previous: Span) -> float:
        """Microseconds the compute stream was idle between ``previous`` and this step."""
        return self.begin.elapsed_ms(previous.end) * 1e3


@dataclass(slots=True)
class Step:
    """One launch in flight.

    Attributes:
        index: number of the step, from 0 on, in order of launch.
        slot: which of the pipeline's slots it has.
        batch: the decode rows, if any.
        span: its device time; None without timing.
        finalized: its sampling is enqueued; False while it waits for masks.
        gap_us: how long the device was idle before it, microseconds, once it is committed; None
            where that was not measured, or no step led up to it.
    """

    index: int
    slot: int
    key: StepKey
    batch: DecodeBatch | None
    chunks: tuple[ChunkSegment, ...]
    span: Span | None
    finalized: bool
    gap_us: float | None = None

    @property
    def num_rows(self) -> int:
        """Rows that it holds, without padding."""
        return (0 if self.batch is None else len(self.batch.rows)) + len(self.chunks)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows that it holds: decode rows, then those of chunks."""
        decode = () if self.batch is None else self.batch.rows
        return (*decode, *(chunk.row for chunk in self.chunks))

    def constrained(self) -> Iterator[tuple[int, Row]]:
        """Segments that are sampled with a mask: their index and row."""
        if self.batch is not None:
            for column in self.batch.constrained:
                yield column, self.batch.rows[column]
        for i, chunk in enumerate(self.chunks, self.key.decode_rows):
            if chunk.sample and chunk.row.params.constrained:
                yield i, chunk.row

    @property
    def num_scored(self) -> int:
        """Chunk tokens with log-probabilities."""
        return self.key.chunk_tokens if self.key.scored else 0

    def with_logprobs(self) -> Iterator[tuple[int, Row]]:
        """Segments that are sampled, and whose rows ask for log-probabilities: index and row."""
        if self.batch is not None:
            for column in self.batch.logprobs:
                yield column, self.batch.rows[column]
        for i, chunk in enumerate(self.chunks, self.key.decode_rows):
            if chunk.sample and chunk.row.params.logprobs is not None:
                yield i, chunk.row


class TokenLogprobs(NamedTuple):
    """The natural log-probability of a token, and the likeliest ids in order, each with its own."""

    sampled: float
    top: tuple[tuple[int, float], ...]


class RowEvent(NamedTuple):
    """What one commit says about one row: the tokens that it got, in order, and its end, which is
    behind the last of them. ``error`` comes with ``FinishReason.ERROR``; with ``FinishReason.STOP``
    the last token is a stop token, or, where the answer is ``complete``, one behind which the row's
    automaton allows nothing.
    """

    row: Row
    tokens: tuple[int, ...]
    finish: FinishReason | None
    error: str | None = None
    complete: bool = False


@dataclass(slots=True)
class StepResult:
    """What one commit reports, in columns. To iterate over it gives a `RowEvent` for each row that
    was sampled, in the step's order: none for rows that had ended, and for chunks that do not end
    their prompt.

    Attributes:
        step: None where nothing was in flight.
        rows: its decode rows.
        tokens: int32, what each of them got: the first tokens of all, then the second ones, and so
            on, in as many columns as the most that one got; negative where a row has no more. A row
            that had ended before has none.
        events: of rows that need a look: decode rows that end here, by column, and every chunk that
            was sampled, from column ``len(rows)`` on. All others go on with their tokens.
        short: decode rows that got fewer tokens than a step may give, none at all included, and
            have not ended before: how many each got, by column.
        count: tokens in all.
        zombies: segments of rows that had ended before.
        logprobs: of rows that ask for them, and whose tokens are delivered: one for each token.
        prompt_logprobs: of chunks whose rows ask for them: the position of the first, and those of
            the tokens behind each but the prompt's last.
    """

    step: Step | None = None
    rows: tuple[Row, ...] = ()
    tokens: list[array[int]] = field(default_factory=list)
    events: dict[int, RowEvent] = field(default_factory=dict)
    short: dict[int, int] = field(default_factory=dict)
    count: int = 0
    zombies: int = 0
    logprobs: dict[Row, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[Row, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RowEvent]:
        for column, row in enumerate(self.rows):
            if (event := self.events.get(column)) is not None:
                yield event
            elif tokens := self.tokens_of(column):
                yield RowEvent(row, tokens, None)
        for column in sorted(self.events):
            if column >= len(self.rows):
                yield self.events[column]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def tokens_of(self, column: int) -> tuple[int, ...]:
        """What one decode row got."""
        return tuple(step[column] for step in self.tokens if step[column] >= 0)

    @property
    def even(self) -> bool:
        """Whether each decode row got one token and goes on, and no chunk was sampled."""
        return not self.events and len(self.tokens) == 1 and self.count == len(self.rows)


@dataclass(slots=True)
class StepTensors:
    """The device memory of one step, as ``forward(step)`` and ``sample(step)`` see it: fixed
    addresses, safe to capture. They enqueue on the runtime's compute stream, on CUDA torch's
    current one, and do not wait for it. T and R are those of the step's key and count padding;
    ``rows`` is the runtime's ``max_rows`` + 1, as row 0 is padding.

    Attributes:
        kind: decode, prefill or mixed.
        decode_tokens: how many leading tokens are for decode rows, padding included: T in a decode
            step, 0 in a prefill step. Chunks begin behind them.
        decode_meta: int32 [T, 4], see layout.Meta: token, position, length, row per token; length 0
            is a dead or padding token.
        segments: int32 [R, 4]: row, first token, number of tokens, flags (layout.SegmentFlag); of a
            decode step, segment i is token i.
        counts: int32 [3], see layout.Count: 1 + the last live token that was carried over, 1 + the
            last live token, 1 + the last live segment that is to be sampled.
        tables: the device tables, in the order of layout.DeltaTable.
        page_table: int32 [rows, pages_per_row]: the KV pages of each live row, in order of
            position; -1 where there is none.
        row_state: int32 [rows, 32], see layout.RowColumn.
        sampled: int32 [R]; a custom ``sample`` writes, for each segment that is to be sampled, an
            id below vocab, or a negative number, which ends the row with an error. What it writes
            for others is not looked at.
        max_length: no token's length is larger, in this step and in every other: the runtime's
            ``max_len``. The lengths themselves are on the device alone, so that a captured step
            serves them all; a kernel that is launched by the longest gets this one.
        logits: [R, vocab], float32, float16 or bfloat16, last stride 1: what follows each segment's
            last token. ``forward`` assigns it; what does not fit is a ConfigError of the capture or
            the eager launch. Host masks are written into it.
        features: what rows may ask for, and in other steps none does. LORA: adapters, in slots that
            ``row_state`` names. SPATIAL: answers of values, whose ids follow those of the
            vocabulary, and may be fed.
        value_logits: [R, 3 * bins], of a SPATIAL step: the logits of coordinates, widths and
            heights. ``forward`` assigns it.
        score: of a step in which a prompt gets log-probabilities: ``forward`` calls it with the
            logits of all chunk tokens, in parts: [n, vocab], and the first token's index. They are
            read in stream order.
    """

    kind: StepKind
    decode_tokens: int
    decode_meta: torch.Tensor
    segments: torch.Tensor
    counts: torch.Tensor
    tables: list[torch.Tensor]
    page_table: torch.Tensor
    row_state: torch.Tensor
    sampled: torch.Tensor
    max_length: int
    logits: torch.Tensor | None = None
    features: StepFeatures = StepFeatures.NONE
    value_logits: torch.Tensor | None = None
    score: Callable[[torch.Tensor, int], None] | None = None


Forward = Callable[[StepTensors], None]
Sample = Callable[[StepTensors], None]
Fill = Callable[["Row", memoryview], None]
