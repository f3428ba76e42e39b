"""The rows that decode together, as columns; only columns that change are made anew."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not
from typing import TypeVar

from photon_ext.errors import PipelineError
from photon_ext.layout import SEGMENT_COLUMNS, SegmentFlag
from photon_ext.runtime.row import DecodeEpoch, Row
from photon_ext.runtime.step import StepKey
from photon_ext.runtime.step_features import features_of, joined

_SAMPLE = int(SegmentFlag.SAMPLE)
_T = TypeVar("_T")


class DecodeBatch:
    """A fixed set of rows, each with one token a step. A steady decode step costs it two additions,
    and a row that joins or leaves costs the others nothing: they keep their columns of the batch
    before.

    Attributes:
        rows, indices, generations: the rows, in columns, and how their records name them.
        limits: for each row, the epoch's launch by which it runs out of tokens or pages (counted
            when it joined, or was last looked at).
        limit: the least of them: then the batch must be made anew.
        constrained: columns of rows that wait for host masks.
        logprobs: columns of rows that ask for log-probabilities.
        features: what each row asks for, a byte of `features_of`.
        key: of a step with this batch alone.
        words: segments, int32 [bucket, 4], those of padding zero; the batch before's own object
            where nothing in them has changed.
        epoch: counts the launches, with those of the batches before it.
    """

    rows: tuple[Row, ...]
    indices: array[int]
    generations: array[int]
    limits: list[int]
    limit: int
    constrained: tuple[int, ...]
    logprobs: tuple[int, ...]
    features: bytearray
    words: array[int]
    epoch: DecodeEpoch

    def __init__(
        self, rows: tuple[Row, ...], bucket: int, before: DecodeBatch | None = None
    ) -> None:
        """`before`: the batch that this one follows, which is launched no more. Raises
        PipelineError where a row is named twice, or has no token to launch.
        """
        old = DecodeBatch._none() if before is None else before
        self.epoch = old.epoch
        changed = changed_columns(old.rows, rows)
        if self.epoch.launches >= old.limit:
            changed += _due(old.limits[: len(rows)], self.epoch.launches)
        others = {rows[column] for column in changed}
        left = {*old.rows[len(rows) :], *(old.rows[i] for i in changed if i < len(old.rows))}
        leaving = [row for row in left - others if row.epoch is self.epoch]
        joining = [row for row in others if row.epoch is not self.epoch]
        if self.epoch.rows - len(leaving) + len(joining) != len(rows):
            raise _refusal(rows)
        self.rows = rows
        self._copy(old, bucket)
        self._fill(changed)
        if self.words == old.words:
            self.words = old.words  # by which a slot knows that it has sent them
        self.limit = min(self.limits)
        self.constrained = patched(old.constrained, changed, rows, _is_constrained)
        self.logprobs = patched(old.logprobs, changed, rows, _has_logprobs)
        asked = self.features.translate(None, b"\0")  # as nearly always nothing
        self.key = StepKey(bucket, 0, 0, bool(self.constrained), joined({*asked}))
        for row in leaving:  # at the end, as an interrupt may come before
            row.join(None)
        for row in joining:
            row.join(self.epoch)

    @classmethod
    def _none(cls) -> DecodeBatch:
        """A batch without rows, where there is none before."""
        batch = cls.__new__(cls)
        batch.rows, batch.constrained, batch.logprobs = (), (), ()
        batch.indices, batch.generations = array("i"), array("i")
        batch.limits, batch.features = [], bytearray()
        batch.words, batch.epoch, batch.limit = array("i"), DecodeEpoch(), 1
        return batch

    def _copy(self, old: DecodeBatch, bucket: int) -> None:
        """Takes over all columns, for as many rows as there are now."""
        size, kept = len(self.rows), min(len(self.rows), len(old.rows))
        self.indices, self.generations = old.indices[:kept], old.generations[:kept]
        self.limits, self.features = old.limits[:kept], old.features[:kept]
        if more := [0] * (size - kept):
            for column in (self.indices, self.generations, self.limits, self.features):
                column.extend(more)
        self.words = old.words[: kept * SEGMENT_COLUMNS]
        self.words.frombytes(bytes(4 * SEGMENT_COLUMNS * (bucket - kept)))

    def _fill(self, columns: Sequence[int]) -> None:
        """Writes these columns. Raises PipelineError where one of their rows cannot decode."""
        launched = self.epoch.launches
        for column in columns:
            row = self.rows[column]
            left = row.steps_left
            if left < 1 or not row.wants_decode:
                raise _refusal(self.rows)
            self.indices[column], self.generations[column] = row.index, row.generation
            self.limits[column], self.features[column] = left + launched, features_of(row)
            begin = column * SEGMENT_COLUMNS
            words = array("i", (row.index, column, 1, _SAMPLE))
            self.words[begin : begin + SEGMENT_COLUMNS] = words

    @property
    def ready(self) -> bool:
        """Whether it can be launched once more as it stands: none of its rows has ended, or decodes
        elsewhere, or has reached its limit.
        """
        return self.epoch.launches < self.limit and self.epoch.rows == len(self.rows)

    def due(self) -> list[Row]:
        """The rows that have reached their limits."""
        return [self.rows[column] for column in _due(self.limits, self.epoch.launches)]

    def launch(self, step: int) -> None:
        """A step with it was launched."""
        self.epoch.last_step = step
        self.epoch.launches += 1


def changed_columns(old: Sequence[object], rows: Sequence[object]) -> list[int]:
    """The columns of ``rows`` that hold others than those of ``old``, in order."""
    return [*compress(count(), map(is_not, old, rows)), *range(len(old), len(rows))]


def patched(
    columns: tuple[int, ...],
    changed: Sequence[int],
    members: Sequence[_T],
    test: Callable[[_T], bool],
) -> tuple[int, ...]:
    """The columns of the members that pass a test, where ``columns`` did before some changed."""
    found = [column for column in changed if test(members[column])]
    if not (columns or found):  # as nearly always
        return ()
    kept = {column for column in columns if column < len(members)}.difference(changed)
    return tuple(sorted(kept.union(found)))


def _due(limits: Sequence[int], launches: int) -> list[int]:
    return [column for column, limit in enumerate(limits) if limit <= launches]


def _is_constrained(row: Row) -> bool:
    return row.params.constrained


def _has_logprobs(row: Row) -> bool:
    return row.params.logprobs is not None


def _refusal(rows: tuple[Row, ...]) -> PipelineError:
    """Says which of the rows cannot decode, and why."""
    if len(set(rows)) < len(rows):
        return PipelineError("a plan names a row twice; a step has it once")
    for row in rows:
        if not row.wants_decode:
            return PipelineError(f"{row} has no token to decode; leave it out of the plan")
    row = next(row for row in rows if row.steps_left < 1)
    return PipelineError(
        f"{row} has no page for position {row.next_position}; append pages to it, or leave it out "
        "of the plan"
    )
