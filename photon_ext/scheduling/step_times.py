"""What steps took lately, by what they had: for whoever plans by it, and for the meter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from photon_ext.runtime import Step, StepFeatures, StepResult
from photon_ext.runtime.decode_batch import DecodeBatch

EVERY = 16  # of so many decode steps of the same rows one is timed where the clock does it
WEIGHT = 1 / 8  # of a new time in what steps take as a rule
SLOW_WEIGHT = 1 / 64  # of a longer time in the least that they take


class StepLoad(NamedTuple):
    """Steps that take the same: decode rows (a bucket, at least 1), prompt tokens, features."""

    decode_rows: int
    prompt_tokens: int = 0
    features: StepFeatures = StepFeatures.NONE

    @classmethod
    def of(cls, step: Step) -> StepLoad | None:
        """None: it is not timed, as it has no decode rows, or scores a prompt."""
        if step.batch is None or step.key.scored:
            return None
        tokens = sum(chunk.num_tokens for chunk in step.chunks)
        return cls(step.batch.key.decode_rows, tokens, step.key.features)

    def beside(self, prompt_tokens: int) -> StepLoad:
        """The same rows, with so many prompt tokens."""
        return StepLoad(self.decode_rows, prompt_tokens, self.features)


@dataclass(slots=True)
class StepTime:
    """Microseconds that steps of one load take.

    Attributes:
        least: follows a shorter time at once, and a longer one slowly: for whoever must not be too
            late.
        usual: follows either.
        most: follows a longer time at once: for whoever must not take too long.
    """

    least: float
    usual: float
    most: float

    def add(self, us: float) -> None:
        """Another step took `us`."""
        self.least = us if us < self.least else self.least + SLOW_WEIGHT * (us - self.least)
        self.usual += WEIGHT * (us - self.usual)
        self.most = us if us > self.most else self.most + WEIGHT * (us - self.most)


class StepTimes:
    """Times decode steps, and mixed steps of certain numbers of prompt tokens: all by the device's
    events where steps have them; else by the clock, from one commit to the next, and of decode
    steps of the same rows one in EVERY.

    Attributes:
        budgets: these numbers, ascending.
        known: by load.
        latest_us: the usual time of the load that was timed last; None: none was.
    """

    def __init__(
        self, budgets: tuple[int, ...] = (), clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """`clock`: nanoseconds."""
        self.budgets = budgets
        self.known: dict[StepLoad, StepTime] = {}
        self.latest_us: float | None = None
        self._clock = clock
        self._last_ns: int | None = None
        self._batch: DecodeBatch | None = None
        self._repeats = 0

    def add(self, load: StepLoad, us: float) -> None:
        """A step of this load took `us`."""
        known = self.known.get(load)
        if known is None:
            self.known[load] = known = StepTime(us, us, us)
        else:
            known.add(us)
        self.latest_us = known.usual

    def committed(self, result: StepResult, busy: bool) -> StepLoad | None:
        """A step was committed; `busy`: rows are left, so that another follows at once. Returns its
        load where it was timed.
        """
        step = result.step
        if step is None:
            return None
        us: float | None = None
        if step.span is None:
            last, now = self._last_ns, self._clock()
            self._last_ns = now if busy else None  # the device may have a rest
            if step.batch is self._batch and not step.chunks:
                self._repeats += 1
                if self._repeats % EVERY:  # as nearly always
                    return None
            else:
                self._batch, self._repeats = None if step.chunks else step.batch, 0
            us = None if last is None else (now - last) / 1e3
        if not result.count:  # a step of dead rows alone ends early
            return None
        load = StepLoad.of(step)
        if load is None or (step.chunks and load.prompt_tokens not in self.budgets):
            return None
        us = us if step.span is None else step.span.length_us()
        if us is None:
            return None
        self.add(load, us)
        return load
