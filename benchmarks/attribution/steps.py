"""A log of an engine's steps: what was committed when, and how long the device took for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.common.result import BenchmarkError
from photon_ext.runtime import Step, probe
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import StepKind

STEADY_ROWS = 0.75  # of the streams: steps with fewer belong to the begin or the end of a run


class StepRecord(NamedTuple):
    """One committed step.

    Attributes:
        ready_ns: when its results were on the host, nanoseconds. end_ns: when its commit returned.
        kind: decode or prefill.
        rows: its rows, zombies included. zombies: of them, those whose sequence had ended.
        device_us: how long it ran on the device; None without timing.
        gap_us: how long the device was idle before it; None without timing and for the first one.
    """

    ready_ns: int
    end_ns: int
    kind: StepKind
    rows: int
    zombies: int
    device_us: float | None = None
    gap_us: float | None = None

    @property
    def dead(self) -> bool:
        return self.zombies == self.rows

    def steady(self, streams: int) -> bool:
        """Whether it is a decode step of a batch that is as full as it gets."""
        full = self.rows >= STEADY_ROWS * streams
        return self.kind is StepKind.DECODE and not self.dead and full


@dataclass
class StepLog:
    """The steps of one run, when its first launch began, and how many steps were in flight."""

    begin_ns: int = 0
    depth: int = 0
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the first launch to the last commit that brought a token."""
        return (max(step.end_ns for step in self.steps if not step.dead) - self.begin_ns) / 1e9

    def intervals_ms(self) -> list[tuple[StepRecord, float]]:
        """Each step with its period, milliseconds.

        At depth 1 the host's part of a step follows the device's: a period ends with the commit.
        At depth 2 the device's parts follow each other: a period ends with the results.
        """
        stamps = [step.end_ns if self.depth == 1 else step.ready_ns for step in self.steps]
        begins = [self.begin_ns, *stamps]
        return [
            (step, (end - begin) / 1e6)
            for step, begin, end in zip(self.steps, begins, stamps, strict=False)
        ]


class _Recorder:
    """Implements `photon_ext.runtime.probe.Probe`: writes the log of the pipeline that works."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._open: list[Phase] = []
        self._ready_ns = 0
        self._committed: tuple[Step, int] | None = None

    def turn(self, phase: Phase | None) -> None:
        """Where a turn of the engine's loop begins does not matter here."""

    def begin(self, phase: Phase, step: int | None) -> None:
        self._open.append(phase)
        if phase is Phase.PLAN and not self._log.begin_ns:
            self._log.begin_ns = time.perf_counter_ns()

    def end(self) -> None:
        phase = self._open.pop() if self._open else None
        if phase is Phase.WAIT:
            self._ready_ns = time.perf_counter_ns()
        elif phase is Phase.COMMIT and self._committed is not None:
            self._record(*self._committed)
            self._committed = None

    def launched(self, step: Step, words: int) -> None:
        """A step is recorded once it is committed."""

    def committed(self, step: Step, zombies: int) -> None:
        self._committed = step, zombies

    def _record(self, step: Step, zombies: int) -> None:
        record = StepRecord(
            ready_ns=self._ready_ns,
            end_ns=time.perf_counter_ns(),
            kind=step.key.kind,
            rows=step.num_rows,
            zombies=zombies,
            device_us=None if step.span is None else step.span.length_us(),
            gap_us=step.gap_us,
        )
        self._log.steps.append(record)


@contextmanager
def logged_steps(depth: int) -> Iterator[StepLog]:
    """Logs the steps of the one pipeline, of that depth, that works in the block.

    Raises BenchmarkError while a timeline is recorded.
    """
    if probe.active is not None:
        raise BenchmarkError("a timeline is being recorded, and slows steps down; end it first")
    log = StepLog(depth=depth)
    gc.collect()  # what an earlier run left is not collected in this one
    probe.active = _Recorder(log)
    try:
        yield log
    finally:
        probe.active = None
