"""How long committed steps took, for the cost table."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_ext.runtime import StepResult
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.scheduling.cost_table import CostTable

EVERY = 16  # of this many decode steps of the same rows one is timed


class StepTimer:
    """Times steps with decode rows: by the device's events where steps have them; else by the
    clock, from one commit to the next.
    """

    def __init__(self, costs: CostTable, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`clock`: nanoseconds."""
        self._costs = costs
        self._clock = clock
        self._last_ns: int | None = None
        self._batch: DecodeBatch | None = None
        self._repeats = 0

    def committed(self, result: StepResult, busy: bool) -> None:
        """A step was committed; `busy`: rows are left, so that another follows at once."""
        step = result.step
        if step is None:
            return
        span = step.span
        us = self._since_last(busy) if span is None else None
        if step.batch is None or not result.count:  # a step of dead rows alone ends early
            return
        if step.key.scored:  # takes longer than others of its tokens
            return
        repeats = step.batch is self._batch and not step.chunks
        self._repeats = self._repeats + 1 if repeats else 0
        if self._repeats % EVERY:
            return
        self._batch = None if step.chunks else step.batch
        us = us if span is None else span.length_us()
        if us is not None:
            tokens = sum(chunk.num_tokens for chunk in step.chunks)
            self._costs.add((step.batch.key.decode_rows, step.key.features), tokens, us)

    def _since_last(self, busy: bool) -> float | None:
        """Microseconds since the commit before; None where the device may have had a rest."""
        last, now = self._last_ns, self._clock()
        self._last_ns = now if busy else None
        return None if last is None else (now - last) / 1e3
