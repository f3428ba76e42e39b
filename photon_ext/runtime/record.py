"""What a step's output records say: the device's verdict on what was sampled, and on who has ended.

A record is RECORD_WIDTH words (csrc/common/out_record.h). Decode rows are read in columns, and only
those with a flag one by one.
"""

from __future__ import annotations

from photon_ext.errors import PipelineError, describe
from photon_ext.layout import RECORD_TOKENS, RECORD_WIDTH, RecordFlag
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import ChunkSegment, FinishReason, RowEvent, Step, StepResult

ROW, GENERATION, NUM_TOKENS, FLAGS = range(RECORD_TOKENS)
DEAD, FAULTS = int(RecordFlag.DEAD), int(RecordFlag.MASK_ERROR | RecordFlag.NO_CANDIDATE)
STOP, LENGTH = int(RecordFlag.STOP), int(RecordFlag.LENGTH)


def read_step(step: Step, records: memoryview, vocab_size: int) -> StepResult:
    """The result of a step.

    Args:
        step: the step.
        records: int32 words of all its segments.
        vocab_size: token ids lie below it.

    Raises:
        PipelineError: a record is not of the row that it should be of, or not one that a step can
            leave.
    """
    result = StepResult(step)
    if step.batch is not None:
        _read_batch(step, step.batch, records, vocab_size, result)
    for i, chunk in enumerate(step.chunks):
        begin = (step.key.decode_rows + i) * RECORD_WIDTH
        event = _read_chunk(chunk, records[begin : begin + RECORD_WIDTH].tolist(), vocab_size)
        if event is not None:
            result.events[len(result.rows) + i] = event
            result.count += event.token is not None
    return result


def _read_batch(
    step: Step, batch: DecodeBatch, records: memoryview, vocab_size: int, result: StepResult
) -> None:
    end = len(batch.rows) * RECORD_WIDTH
    flags = records[FLAGS:end:RECORD_WIDTH].tolist()
    tokens = records[RECORD_TOKENS:end:RECORD_WIDTH].tolist()
    if records[ROW:end:RECORD_WIDTH].tolist() != batch.indices:
        raise _foreign(batch, records)
    if records[GENERATION:end:RECORD_WIDTH].tolist() != batch.generations:
        raise _foreign(batch, records)
    result.rows, result.tokens = batch.rows, tokens
    result.count = len(tokens)
    if batch.intact and not any(flags):
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            column = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise _no_token(batch.rows[column], tokens[column], vocab_size)
        return
    skipped = set()
    for column, row in enumerate(batch.rows):
        if not row.delivers:
            skipped.add(column)
        elif flags[column] or not 0 <= tokens[column] < vocab_size:
            position = batch.positions[column] + step.launch
            result.events[column] = _event(row, flags[column], tokens[column], position, vocab_size)
    result.skipped = frozenset(skipped)
    faults = sum(event.token is None for event in result.events.values())
    result.count -= len(skipped) + faults


def _read_chunk(chunk: ChunkSegment, record: list[int], vocab_size: int) -> RowEvent | None:
    """The event of a chunk; None where it was not sampled, or its row had ended."""
    row = chunk.row
    if not row.delivers:
        return None
    if record[ROW] != row.index or record[GENERATION] != row.generation or record[FLAGS] & DEAD:
        raise _no_record(row, record)
    if not chunk.sample:
        return None
    position = chunk.position + chunk.num_tokens - 1
    return _event(row, record[FLAGS], record[RECORD_TOKENS], position, vocab_size)


def _event(row: Row, flags: int, token: int, position: int, vocab_size: int) -> RowEvent:
    if flags & DEAD:
        raise PipelineError(
            f"{row}: the device says that it is dead (flags {flags}), and nobody has ended it"
        )
    if flags & FAULTS:
        return RowEvent(row, None, FinishReason.ERROR, _fault_text(row, flags, position))
    if not 0 <= token < vocab_size:
        raise _no_token(row, token, vocab_size)
    reason = None
    if flags:
        reason = FinishReason.STOP if flags & STOP else FinishReason.LENGTH
    return RowEvent(row, token, reason)


def _fault_text(row: Row, flags: int, position: int) -> str:
    if row.fault is not None:
        return f"the constraint raised at position {position}: {describe(row.fault)}"
    if flags & RecordFlag.MASK_ERROR:
        return (
            f"no mask arrived for position {position}; a constrained row is never sampled without "
            "one"
        )
    # The device's flag is the same for both reasons.
    if row.params.constrained:
        cause = (
            "the constraint allows nothing there, or, less likely, all logits that it allows are "
            "NaN or -inf; look at what it allows"
        )
    else:
        cause = (
            "all of its logits are NaN or -inf; look at the weights, the dtype and the forward, or "
            "at a sample function of your own"
        )
    return f"no token can be sampled at position {position}: {cause}"


def _foreign(batch: DecodeBatch, records: memoryview) -> PipelineError:
    for i, row in enumerate(batch.rows):
        record = records[i * RECORD_WIDTH : (i + 1) * RECORD_WIDTH].tolist()
        if (record[ROW], record[GENERATION]) != (row.index, row.generation):
            return _no_record(row, record)
    raise AssertionError("every record is its row's")


def _no_record(row: Row, record: list[int]) -> PipelineError:
    return PipelineError(
        f"{row}: its record says row {record[ROW]}, generation {record[GENERATION]}, flags "
        f"{record[FLAGS]}; the step's outputs are not its own"
    )


def _no_token(row: Row, token: int, vocab_size: int) -> PipelineError:
    return PipelineError(
        f"{row}: sampling gave token {token}; ids lie in [0, {vocab_size}); look at the sample "
        "function"
    )
