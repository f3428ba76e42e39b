"""The rows that decode together, as columns: made anew when a row joins, leaves or ends."""

from __future__ import annotations

from array import array

from photon_ext.errors import PipelineError
from photon_ext.layout import SEGMENT_COLUMNS, SegmentFlag
from photon_ext.runtime.row import NEVER, Row, RowState
from photon_ext.runtime.step import StepKey

_SAMPLE = int(SegmentFlag.SAMPLE)


class DecodeBatch:
    """A fixed set of rows, each with one token a step. A quiet step costs it two additions.

    Attributes:
        rows, indices, generations: the rows, in columns, and how their records name them.
        positions: where each row's token of the first launch goes.
        constrained: columns of rows that wait for host masks.
        logprobs: columns of rows that ask for log-probabilities.
        key: of a step with this batch alone.
        words: segments, int32 [bucket, 4], those of padding zero.
        launches: how many steps were launched with it.
        limit: launches after which a row's cap is covered, or its pages are full, so that the batch
            is to be made anew.
        last_step: number of the latest of these steps; NEVER: none.
        intact: every row still runs, and is in no later batch. The records of other batches are
            read row by row.
    """

    def __init__(self, rows: tuple[Row, ...], bucket: int) -> None:
        """Takes the rows over from the batches they were in. Raises PipelineError where a row is
        named twice, or has no token to launch.
        """
        if len(set(rows)) < len(rows):
            raise PipelineError("a plan names a row twice; each has one token a step")
        sampled = [row.sampled for row in rows]
        positions = [len(row.prompt_ids) + n - 1 for row, n in zip(rows, sampled, strict=True)]
        left = [row.params.max_new_tokens - n for row, n in zip(rows, sampled, strict=True)]
        places = [row.capacity - n for row, n in zip(rows, positions, strict=True)]
        limit, running = min(*left, *places), RowState.RUNNING
        if limit < 1 or min(sampled) < 1 or any(row.state is not running for row in rows):
            raise _misfit(rows)
        self.rows = rows
        self.launches = 0
        self.last_step = NEVER
        self.intact = True
        self.indices = [row.index for row in rows]
        self.generations = [row.generation for row in rows]
        self.positions = positions
        self.constrained = tuple(i for i, row in enumerate(rows) if row.params.constrained)
        self.limit = limit
        self.logprobs = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
        lora = any(row.lora_slot for row in rows)
        self.key = StepKey(bucket, 0, 0, bool(self.constrained), lora)
        self.words = array("i", bytes(4 * SEGMENT_COLUMNS * bucket))
        count = len(rows)
        columns = (self.indices, range(count), [1] * count, [_SAMPLE] * count)
        for column, values in enumerate(columns):
            self.words[column : count * SEGMENT_COLUMNS : SEGMENT_COLUMNS] = array("i", values)
        for row in rows:  # at the end, as an interrupt may come before
            row.join(self)

    @property
    def ready(self) -> bool:
        """Whether it can be launched once more as it stands."""
        return self.intact and self.launches < self.limit

    def launch(self, step: int) -> int:
        """A step with it was launched; returns which of its launches that is, from 0 on."""
        self.last_step = step
        self.launches += 1
        return self.launches - 1


def _misfit(rows: tuple[Row, ...]) -> PipelineError:
    """Says which of the rows cannot ride, and why."""
    for row in rows:
        if not row.wants_decode:
            return PipelineError(f"{row} has no token to decode; leave it out of the plan")
    row = next(row for row in rows if row.next_position >= row.capacity)
    return PipelineError(
        f"{row} has no page for position {row.next_position}; append pages to it, or leave it out "
        "of the plan"
    )
