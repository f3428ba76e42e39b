"""What a step's output record says about its row: the device's verdict on what was sampled, and
on whether the row has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from photon_ext.errors import PipelineError, describe
from photon_ext.layout import RECORD_TOKENS, RecordFlag
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import FinishReason, RowEvent, Segment


def read_record(segment: Segment, record: Sequence[int], vocab_size: int) -> RowEvent | None:
    """The event of a running row; None where the segment was not sampled.

    Args:
        segment: the row's part of the step.
        record: its RECORD_WIDTH words (csrc/common/out_record.h).
        vocab_size: token ids lie below it.

    Raises:
        PipelineError: the record is not this segment's, or not one that a step can leave.
    """
    row = segment.row
    index, generation, tokens, flags = record[:RECORD_TOKENS]
    if (index, generation) != (row.index, row.generation) or flags & RecordFlag.DEAD:
        raise PipelineError(
            f"{row}: its record says row {index}, generation {generation}, flags {flags}; the "
            "step's outputs are not its own"
        )
    if not segment.sample:
        return None
    if flags & (RecordFlag.MASK_ERROR | RecordFlag.NO_CANDIDATE):
        return RowEvent(
            row, None, FinishReason.ERROR, _fault_text(row, flags, segment.sampled_position)
        )
    if tokens != 1:
        raise PipelineError(f"{row}: a sampled segment reports {tokens} tokens, flags {flags}")
    token = record[RECORD_TOKENS]
    if not 0 <= token < vocab_size:
        raise PipelineError(
            f"{row}: sampling gave token {token}; ids lie in [0, {vocab_size}); look at the sample "
            "function"
        )
    return RowEvent(row, token, _finish_reason(flags))


def _fault_text(row: Row, flags: int, position: int) -> str:
    if row.fault is not None:
        return f"the constraint raised at position {position}: {describe(row.fault)}"
    if flags & RecordFlag.MASK_ERROR:
        return (
            f"no mask arrived for position {position}; a constrained row is never sampled "
            "without one"
        )
    # The device's flag is the same for both reasons.
    if row.constrained:
        cause = (
            "the constraint allows nothing there, or, less likely, all logits that it allows "
            "are NaN or -inf; look at what it allows"
        )
    else:
        cause = (
            "all of its logits are NaN or -inf; look at the weights, the dtype and the "
            "forward, or at a sample function of your own"
        )
    return f"no token can be sampled at position {position}: {cause}"


def _finish_reason(flags: int) -> FinishReason | None:
    if flags & RecordFlag.STOP:
        return FinishReason.STOP
    return FinishReason.LENGTH if flags & RecordFlag.LENGTH else None
