"""The rows that decode together, as columns: made when a row joins, leaves or ends, and otherwise
launched again and again as it stands.
"""

from __future__ import annotations

from array import array
from operator import attrgetter

from photon_ext.errors import PipelineError
from photon_ext.layout import SEGMENT_COLUMNS, SegmentFlag
from photon_ext.runtime.row import NEVER, Row

_COLUMNS = attrgetter("index", "generation")


class DecodeBatch:
    """A fixed set of rows, each with one token a step. A quiet step costs it two additions.

    Attributes:
        rows: the rows; their place is their column.
        indices, generations: of the rows, as their records name them.
        positions: where each row's token of the first launch goes.
        constrained: columns of rows that wait for host masks.
        words: segments, int32 [bucket, 4], those of padding zero.
        launches: how many steps were launched with it.
        limit: launches after which a row's cap is covered, so that the batch is to be made anew.
        last_step: number of the latest of these steps; NEVER: none.
        intact: every row still runs, and is in no later batch. The records of other batches are
            read row by row.
    """

    __slots__ = (
        "constrained",
        "generations",
        "indices",
        "intact",
        "last_step",
        "launches",
        "limit",
        "positions",
        "rows",
        "words",
    )

    def __init__(self, rows: tuple[Row, ...], bucket: int) -> None:
        """Takes the rows over from the batches they were in.

        Raises:
            PipelineError: a row is named twice, or has no token to launch.
        """
        if len(set(rows)) < len(rows):
            raise PipelineError("a plan names a row twice; each has one token a step")
        for row in rows:
            if not row.wants_decode:
                raise PipelineError(f"{row} has no token to decode; leave it out of the plan")
        for row in rows:
            row.leave_batch()
        pairs = [_COLUMNS(row) for row in rows]
        self.rows = rows
        self.indices = [index for index, _ in pairs]
        self.generations = [generation for _, generation in pairs]
        self.positions = [row.next_position for row in rows]
        self.constrained = tuple(i for i, row in enumerate(rows) if row.params.constrained)
        self.words = array("i", bytes(4 * SEGMENT_COLUMNS * bucket))
        self.words[0 : len(rows) * SEGMENT_COLUMNS : SEGMENT_COLUMNS] = array("i", self.indices)
        self.words[1 : len(rows) * SEGMENT_COLUMNS : SEGMENT_COLUMNS] = array("i", range(len(rows)))
        ones = array("i", [1]) * len(rows)
        self.words[2 : len(rows) * SEGMENT_COLUMNS : SEGMENT_COLUMNS] = ones
        flags = array("i", [int(SegmentFlag.SAMPLE)]) * len(rows)
        self.words[3 : len(rows) * SEGMENT_COLUMNS : SEGMENT_COLUMNS] = flags
        self.launches = 0
        self.limit = min(row.params.max_new_tokens - row.sampled for row in rows)
        self.last_step = NEVER
        self.intact = True
        for row in rows:
            row.batch = self

    @property
    def ready(self) -> bool:
        """Whether it can be launched once more as it stands."""
        return self.intact and self.launches < self.limit

    def launch(self, step: int) -> int:
        """A step with it was launched; returns which of its launches that is, from 0 on."""
        self.last_step = step
        self.launches += 1
        return self.launches - 1
