"""What a step's output records say: the device's verdict on what was sampled, and on who has ended.

A record is RECORD_WIDTH words (csrc/common/out_record.h). Decode rows are read in columns, and only
those with a flag one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress, count, islice

from photon_ext.errors import PipelineError, describe
from photon_ext.layout import LOGPROB_WIDTH, RECORD_TOKENS, RECORD_WIDTH, RecordFlag
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import (
    ChunkSegment,
    FinishReason,
    RowEvent,
    Step,
    StepResult,
    TokenLogprobs,
)

ROW, GENERATION, NUM_TOKENS, FLAGS = range(RECORD_TOKENS)
DEAD, STOP, COMPLETE = int(RecordFlag.DEAD), int(RecordFlag.STOP), int(RecordFlag.COMPLETE)
_NO_TOKEN = -1
FAULTS = int(RecordFlag.MASK_ERROR | RecordFlag.NO_CANDIDATE | RecordFlag.AUTOMATON_ERROR)


def read_step(
    step: Step,
    records: memoryview,
    vocab_size: int,
    ended: frozenset[Row] = frozenset(),
    step_tokens: int = 1,
) -> StepResult:
    """The result of a step, of whose segments ``records`` are the int32 words, and behind them
    those of log-probabilities, where a row asks for them (layout.OutputLayout). ``ended``: rows of
    which some may have been in it, and whose tokens are skipped. ``step_tokens``: tokens that a
    decode row may have got.

    Raises:
        PipelineError: a record is not of its row, or not one that a step can leave.
    """
    result = StepResult(step)
    if step.batch is not None:
        skipped = (
            [column for column, row in enumerate(step.batch.rows) if row in ended] if ended else []
        )
        _read_batch(step.batch, records, vocab_size, skipped, step_tokens, result)
        result.zombies = len(skipped)
    for i, chunk in enumerate(step.chunks):
        result.zombies += not chunk.row.delivers
        begin = (step.key.decode_rows + i) * RECORD_WIDTH
        event = _read_chunk(chunk, records[begin : begin + RECORD_WIDTH].tolist(), vocab_size)
        if event is not None:
            result.events[len(result.rows) + i] = event
            result.count += len(event.tokens)
    for segment, row in step.with_logprobs():
        if row.delivers:
            own = _logprob_words(step, records, step_tokens, segment)
            asked = row.params.logprobs or 0
            count = len(result.tokens_of(segment)) if segment < len(result.rows) else 1
            result.logprobs[row] = [_read_logprobs(words, asked) for words in islice(own, count)]
    if step.key.scored:
        _read_prompts(step, records, step_tokens, result)
    return result


def _logprob_words(
    step: Step, records: memoryview, step_tokens: int, segment: int
) -> Iterator[memoryview]:
    """Of a segment's tokens: those of the first tokens of all segments come first."""
    places = step.key.segments * step_tokens + step.num_scored
    for place in range(segment, places, step.key.segments):
        begin = len(records) - (places - place) * LOGPROB_WIDTH
        yield records[begin : begin + LOGPROB_WIDTH]


def _read_prompts(step: Step, records: memoryview, step_tokens: int, result: StepResult) -> None:
    begin = len(records) - step.num_scored * LOGPROB_WIDTH
    for row, position, tokens, _ in step.chunks:
        asked, known = row.params.prompt_logprobs, len(row.prompt_ids) - 1 - position
        if asked is not None and row.delivers:
            words = (
                records[at : at + LOGPROB_WIDTH]
                for at in range(begin, begin + min(tokens, known) * LOGPROB_WIDTH, LOGPROB_WIDTH)
            )
            result.prompt_logprobs[row] = position, [_read_logprobs(own, asked) for own in words]
        begin += tokens * LOGPROB_WIDTH


def _read_logprobs(words: memoryview, count: int) -> TokenLogprobs:
    floats = words.cast("B").cast("f")
    ids, values = words[1 : 1 + 2 * count : 2].tolist(), floats[2 : 2 + 2 * count : 2].tolist()
    return TokenLogprobs(
        floats[0], tuple(pair for pair in zip(ids, values, strict=True) if pair[0] >= 0)
    )


def _read_batch(
    batch: DecodeBatch,
    records: memoryview,
    vocab_size: int,
    skipped: Sequence[int],
    step_tokens: int,
    result: StepResult,
) -> None:
    end = len(batch.rows) * RECORD_WIDTH
    indices, generations = records[ROW:end:RECORD_WIDTH], records[GENERATION:end:RECORD_WIDTH]
    flags = records[FLAGS:end:RECORD_WIDTH]
    if indices != batch.indices or generations != batch.generations:
        for row, *found in zip(batch.rows, indices, generations, flags, strict=True):
            if found[:2] != [row.index, row.generation]:
                raise _not_its_own(row, *found)
    words = records[RECORD_TOKENS:end:RECORD_WIDTH].tobytes()
    tokens = array("i", words)
    # words are compared in place: most steps have no flag, and lists cost more
    marked = {*compress(count(), flags)} if flags != array("i", bytes(flags.nbytes)) else set[int]()
    ordinary = max(array("I", words)) < vocab_size  # and none is negative
    result.rows, result.tokens, result.count = batch.rows, [tokens], len(tokens) - len(skipped)
    for column in skipped:
        tokens[column] = _NO_TOKEN
    if not ordinary or step_tokens > 1:
        counts = records[NUM_TOKENS:end:RECORD_WIDTH].tolist()
        if counts.count(step_tokens) < len(counts):
            result.short = {
                column: got
                for column, got in enumerate(counts)
                if got < step_tokens and column not in skipped
            }
            result.count -= [*result.short.values()].count(0)
        if not ordinary:
            marked |= _misread(counts, tokens, vocab_size)
    if step_tokens > 1:
        _read_more(records, end, step_tokens, skipped, result)
        marked |= _beyond(vocab_size, result.tokens[1:])
    for column in sorted(marked.difference(skipped)) if marked else ():
        row, flag, got = batch.rows[column], flags[column], result.tokens_of(column)
        position = row.mask_position + len(got)
        event = _event(row, flag, got or (tokens[column],), position, vocab_size)
        result.events[column] = event


def _misread(counts: list[int], tokens: array[int], vocab_size: int) -> set[int]:
    """The rows whose first token is no id of the vocabulary, though they have one."""
    return {
        column
        for column, token in enumerate(tokens)
        if not 0 <= token < vocab_size and (counts[column] or token != _NO_TOKEN)
    }


def _read_more(
    records: memoryview, end: int, step_tokens: int, skipped: Sequence[int], result: StepResult
) -> None:
    """The tokens behind the first of each row, as far as one has any."""
    for i in range(1, step_tokens):
        tokens = array("i", records[RECORD_TOKENS + i : end : RECORD_WIDTH].tobytes())
        for column in skipped:
            tokens[column] = _NO_TOKEN
        if max(tokens) < 0:
            return
        result.tokens.append(tokens)
        result.count += len(tokens) - tokens.count(_NO_TOKEN)


def _beyond(vocab_size: int, columns: list[array[int]]) -> set[int]:
    """The rows with a token that the vocabulary does not have."""
    larger = (tokens for tokens in columns if max(tokens) >= vocab_size)
    return {i for tokens in larger for i, token in enumerate(tokens) if token >= vocab_size}


def _read_chunk(chunk: ChunkSegment, record: list[int], vocab_size: int) -> RowEvent | None:
    """The event of a chunk; None where it was not sampled, or its row had ended."""
    row = chunk.row
    if not row.delivers:
        return None
    index, generation, _, flags, token = record[: RECORD_TOKENS + 1]
    if (index, generation) != (row.index, row.generation) or flags & DEAD:
        raise _not_its_own(row, index, generation, flags)
    if not chunk.sample:
        return None
    return _event(row, flags, (token,), chunk.position + chunk.num_tokens - 1, vocab_size)


def _not_its_own(row: Row, index: int, generation: int, flags: int) -> PipelineError:
    return PipelineError(
        f"{row}: its record says row {index}, generation {generation}, flags {flags}; the step's "
        "outputs are not its own"
    )


def _event(
    row: Row, flags: int, tokens: tuple[int, ...], position: int, vocab_size: int
) -> RowEvent:
    """``position``: of the token behind which nothing could be sampled, with a fault's flag; then a
    single negative token stands for none.
    """
    if flags & DEAD:
        raise PipelineError(
            f"{row}: the device says that it is dead (flags {flags}), and nobody has ended it"
        )
    if flags & FAULTS:
        given = () if tokens[0] < 0 else tokens
        return RowEvent(row, given, FinishReason.ERROR, _fault_text(row, flags, position))
    for token in tokens:
        if not 0 <= token < vocab_size:
            remedy = f"ids lie in [0, {vocab_size}); look at the sample function"
            raise PipelineError(f"{row}: sampling gave token {token}; {remedy}")
    if not flags:
        return RowEvent(row, tokens, None)
    if flags & COMPLETE:
        return RowEvent(row, tokens, FinishReason.STOP, complete=True)
    return RowEvent(row, tokens, FinishReason.STOP if flags & STOP else FinishReason.LENGTH)


def _fault_text(row: Row, flags: int, position: int) -> str:
    if row.fault is not None:
        return f"the constraint raised at position {position}: {describe(row.fault)}"
    if flags & RecordFlag.AUTOMATON_ERROR:
        return (
            f"the row's automaton is not to be found, or forbids the token at position {position}; "
            "what wrote the automaton, or its state, is at fault"
        )
    if flags & RecordFlag.MASK_ERROR:
        return f"no mask arrived for position {position}; without one no constrained row is sampled"
    cause = (
        "all of its logits are NaN or -inf; look at the weights, the dtype and the forward, or at "
        "a sample function of your own"
    )
    if row.params.constrained or row.has_automaton:  # the flag is the same for both reasons
        cause = (
            "the constraint allows nothing there, or, less likely, all logits that it allows are "
            "NaN or -inf; look at what it allows"
        )
    if row.params.forbids_ids:
        cause += (
            "; logit_bias, bad_words or min_tokens forbid ids besides: allow more of them first"
        )
    return f"no token can be sampled at position {position}: {cause}"
