"""What crosses the stream boundary: steps, their segments, and what a commit reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from photon_ext.runtime.ports import Span
    from photon_ext.runtime.row import Row


class StepKind(Enum):
    """A decode step has one token per row; a prefill step has chunks of prompts; a mixed step has
    decode tokens, and chunks behind them.
    """

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class FinishReason(Enum):
    """Why a row ended.

    Commits report a stop id, the cap and errors; who ends a row with `Pipeline.abort` hears nothing
    more of it.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class StepKey(NamedTuple):
    """What a captured graph depends on; everything else that a kernel needs is on the device (I10).

    Attributes:
        kind: decode or prefill.
        num_tokens: T, tokens of the step, those that fill up its bucket included.
        segments: R, segments, likewise.
        split: sampled late, by `Pipeline.finalize`, because a row waits for a host mask.
    """

    kind: StepKind
    num_tokens: int
    segments: int
    split: bool


class Segment(NamedTuple):
    """One row's part of a step: ``num_tokens`` tokens from ``position`` on; ``tokens`` are staged,
    None carries the last token over.

    ``sample``: a token is sampled from the last token's logits; a chunk that does not end its
    prompt is not.
    """

    row: Row
    position: int
    num_tokens: int
    sample: bool
    tokens: tuple[int, ...] | None

    @property
    def sampled_position(self) -> int:
        """Position of the token whose logits are sampled."""
        return self.position + self.num_tokens - 1


@dataclass(slots=True)
class Step:
    """One launch in flight.

    Attributes:
        index: number of the step, from 0 on, in order of launch.
        slot: which of the pipeline's slots it has.
        key: what its graph depends on.
        segments: the rows' parts, without padding.
        span: its device time; None without timing.
        finalized: its sampling is enqueued; False while it waits for masks.
        gap_us: how long the device was idle before it, microseconds, once it is committed; None
            where that was not measured, or no step led up to it.
    """

    index: int
    slot: int
    key: StepKey
    segments: tuple[Segment, ...]
    span: Span | None
    finalized: bool
    gap_us: float | None = None


class RowEvent(NamedTuple):
    """What one commit says about one row: a token, the end, or both. ``error`` comes with
    ``FinishReason.ERROR``, and then no token does.

    A stop token is reported as a token, with ``FinishReason.STOP``.
    """

    row: Row
    token: int | None
    finish: FinishReason | None
    error: str | None = None


@dataclass(slots=True)
class StepTensors:
    """The device memory of one step, as ``forward(step)`` and ``sample(step)`` see it. Fixed
    addresses: safe to capture.

    T and R are those of the step's key and count padding; ``rows`` is the runtime's ``max_rows`` +
    1, as row 0 is padding. ``forward`` and ``sample`` enqueue on the runtime's compute stream, on
    CUDA torch's current one, and do not wait for it.

    Attributes:
        kind: decode, prefill or mixed.
        decode_tokens: how many leading tokens may be decode tokens: T in a decode step, 0 in a
            prefill step. How many of them are is the first of ``counts``.
        decode_meta: int32 [T, 4]: token, position, length, row per token; length 0 is a dead or
            padding token. See layout.Meta.
        segments: int32 [R, 4]: row, first token, number of tokens, flags (layout.SegmentFlag); of a
            decode step, segment i is token i.
        counts: int32 [3]: 1 + the last live token that was carried over, 1 + the last live token, 1
            + the last live segment that is to be sampled; see layout.Count.
        tables: the device tables, in the order of layout.DeltaTable.
        page_table: int32 [rows, pages_per_row]: the KV pages of each live row, in order of
            position; -1 where there is none.
        row_state: int32 [rows, 32], see layout.RowColumn.
        sampled: int32 [R]; a custom ``sample`` writes, for each segment that is to be sampled, an
            id below vocab, or a negative number, which ends the row with an error. What it writes
            for others is not looked at.
        logits: [R, vocab], float32, float16 or bfloat16, last stride 1: what follows each segment's
            last token. ``forward`` assigns it; what does not fit is a ConfigError of the capture or
            the eager launch. Host masks are written into it.
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
    logits: torch.Tensor | None = field(default=None)


Forward = Callable[[StepTensors], None]
Sample = Callable[[StepTensors], None]
Fill = Callable[["Row", memoryview], None]
