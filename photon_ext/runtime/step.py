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
    """A decode step has one line per row; a prefill step has chunks of prompts."""

    DECODE = "decode"
    PREFILL = "prefill"


class FinishReason(Enum):
    """Why a row ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class StepKey(NamedTuple):
    """What a captured graph depends on; everything else that a kernel needs is on the device (I10)."""

    kind: StepKind
    lines: int
    segments: int
    split: bool


class Segment(NamedTuple):
    """One row's part of a step: ``lines`` lines from ``position`` on; ``tokens`` are staged, None carries the last token over."""

    row: Row
    position: int
    lines: int
    sample: bool
    tokens: tuple[int, ...] | None

    @property
    def sampled_position(self) -> int:
        """Position of the line whose logits are sampled."""
        return self.position + self.lines - 1


@dataclass(slots=True)
class Step:
    """One launch in flight. ``gap_us``: how long the device was idle before it, microseconds, once it is committed; None where that was not
    measured, or no step led up to it."""

    index: int
    slot: int
    key: StepKey
    segments: tuple[Segment, ...]
    span: Span | None
    finalized: bool
    gap_us: float | None = None


class RowEvent(NamedTuple):
    """What one commit says about one row: a token, the end, or both. ``error`` comes with ``FinishReason.ERROR``."""

    row: Row
    token: int | None
    finish: FinishReason | None
    error: str | None = None


@dataclass(slots=True)
class StepTensors:
    """The device memory of one step, as ``forward(step)`` and ``sample(step)`` see it. Fixed addresses: safe to capture.

    Attributes:
        kind: decode or prefill.
        decode_meta: int32 [T, 4]: token, position, length, row per line; length 0 is a dead or padding line.
        segments: int32 [R, 4]: row, first line, lines, flags.
        extent: int32 [2]: how many leading lines, and segments, are live.
        page_table: int32 [rows, pages_per_row].
        row_state: int32 [rows, 16].
        sampled: int32 [R]; a custom ``sample`` writes it.
        logits: [R, vocab], float32, float16 or bfloat16; ``forward`` assigns it.
    """

    kind: StepKind
    decode_meta: torch.Tensor
    segments: torch.Tensor
    extent: torch.Tensor
    page_table: torch.Tensor
    row_state: torch.Tensor
    sampled: torch.Tensor
    logits: torch.Tensor | None = field(default=None)


Forward = Callable[[StepTensors], None]
Sample = Callable[[StepTensors], None]
Fill = Callable[["Row", memoryview], None]
