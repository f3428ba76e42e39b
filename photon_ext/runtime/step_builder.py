"""A plan, checked, becomes what a slot launches: a key, segments and staged ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from photon_ext.checks import as_index
from photon_ext.errors import PipelineError, shown
from photon_ext.layout import NO_TOKEN, SEGMENT_COLUMNS, SegmentFlag
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row import Row
from photon_ext.runtime.running_set import RunningSet
from photon_ext.runtime.step import Chunk, ChunkSegment, StepKey, StepPlan
from photon_ext.runtime.step_features import features_of, joined

_CHUNK = int(SegmentFlag.STAGED)
_LAST_CHUNK = int(SegmentFlag.STAGED | SegmentFlag.SAMPLE)


class StepInput(NamedTuple):
    """Who is scheduled in a step, and what SlotPort.launch takes for them."""

    batch: DecodeBatch | None
    chunks: tuple[ChunkSegment, ...]
    key: StepKey
    words: array[int]
    staged: Sequence[int]
    targets: Sequence[int] = ()


class StepBuilder:
    """Keeps the batch of the latest plan, so that a steady decode step costs no work per row."""

    def __init__(self, spec: StepSpec, running_set: RunningSet) -> None:
        self._spec = spec
        self._running_set = running_set
        self._batch: DecodeBatch | None = None

    def build(self, plan: StepPlan) -> StepInput:
        """The input of a step. Raises PipelineError, and changes nothing, where the plan holds a
        row that has nothing to launch, or more than a step takes.
        """
        if plan.chunks:
            self._check_chunks(plan.chunks)
        batch = self._batch_of(plan.decode) if plan.decode else None
        if batch is not None and not plan.chunks:
            return StepInput(batch, (), batch.key, batch.words, ())
        segments = tuple(
            ChunkSegment(row, row.prefilled, count, row.prefilled + count == len(row.prompt_ids))
            for row, count in plan.chunks
        )
        key = self._key(batch, segments)
        staged: list[int] = []
        for row, position, count, _ in segments:
            staged += row.prompt_ids[position : position + count]
        targets = _targets(segments) if key.scored else ()
        return StepInput(batch, segments, key, _words(key, batch, segments), staged, targets)

    def _batch_of(self, rows: tuple[Row, ...]) -> DecodeBatch:
        """The latest batch where it holds the very same rows."""
        batch = self._batch
        if batch is not None and batch.rows is rows and batch.ready:
            return batch
        if not isinstance(rows, tuple):
            raise PipelineError(f"a plan's decode rows are {shown(rows)}; give a tuple of rows")
        if rows is not self._running_set.decode:
            self._check_admitted(rows)
        keys = self._spec.keys
        if len(rows) > keys.max_rows:
            raise PipelineError(
                f"a plan has {len(rows)} decode rows; a step takes {keys.max_rows} (max_rows)"
            )
        self._batch = None  # where it fails, or is interrupted, the next one begins anew
        self._batch = DecodeBatch(rows, keys.decode_bucket(len(rows)), batch)
        return self._batch

    def _check_admitted(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.running and not self._running_set.holds(row):
                raise PipelineError(f"a plan has {row}, which another pipeline admitted")

    def _check_chunks(self, chunks: tuple[Chunk, ...]) -> None:
        self._check_admitted(row for row, _ in chunks)
        for row, tokens in chunks:
            left = len(row.prompt_ids) - row.prefilled if row.wants_prefill else 0
            if not 1 <= (as_index(tokens) or 0) <= left:
                raise PipelineError(
                    f"a plan has a chunk of {shown(tokens)} tokens of {row}; {left} of its prompt "
                    "are left to launch"
                )
        if len({row for row, _ in chunks}) < len(chunks):
            raise PipelineError("a plan has two chunks of one row; give one for both")
        total, most = sum(tokens for _, tokens in chunks), self._spec.chunk
        if total > most:
            raise PipelineError(f"a plan has {total} prompt tokens; a step takes {most} (chunk)")

    def _key(self, batch: DecodeBatch | None, chunks: tuple[ChunkSegment, ...]) -> StepKey:
        """The key of a graph where there is one; else of the step as it is, without padding."""
        rows = 0 if batch is None else len(batch.rows)
        split = batch is not None and batch.key.split
        split = split or any(chunk.sample and chunk.row.params.constrained for chunk in chunks)
        decode = 0 if batch is None else int(batch.key.features)
        features = joined((decode, *(features_of(chunk.row) for chunk in chunks)))
        tokens = sum(chunk.num_tokens for chunk in chunks)
        scored = any(chunk.row.params.prompt_logprobs is not None for chunk in chunks)
        exact = StepKey(rows, tokens, len(chunks), split, features, scored)
        if scored:
            return exact
        return self._spec.keys.find(rows, tokens, len(chunks), split, features) or exact


def _targets(chunks: tuple[ChunkSegment, ...]) -> list[int]:
    """The prompt's next id for each token of the chunks whose rows ask for log-probabilities."""
    targets: list[int] = []
    for row, position, count, _ in chunks:
        asks = row.params.prompt_logprobs is not None
        known = row.prompt_ids[position + 1 : position + 1 + count] if asks else ()
        targets += (*known, *[NO_TOKEN] * (count - len(known)))
    return targets


def _words(key: StepKey, batch: DecodeBatch | None, chunks: tuple[ChunkSegment, ...]) -> array[int]:
    """Segments of a step with chunks, int32 [R, 4]."""
    first = key.decode_rows
    words = array("i") if batch is None else batch.words[: first * SEGMENT_COLUMNS]
    for chunk in chunks:
        flags = _LAST_CHUNK if chunk.sample else _CHUNK
        words.extend((chunk.row.index, first, chunk.num_tokens, flags))
        first += chunk.num_tokens
    padding = key.segments * SEGMENT_COLUMNS - len(words)
    return words + array("i", bytes(4 * padding))
