"""A log of an engine's steps: what was committed when, and where the host's time went meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from benchmarks.common.result import BenchmarkError
from photon_ext.runtime import Step, probe
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.step import StepKind

# of the streams: decode steps with fewer belong to the begin or the end of a run
STEADY_ROWS = 0.75


class Part(Enum):
    """What the host does in a step's period; together they are the whole of it."""

    ADMIT = "admitting requests"
    LAUNCH = "planning and launching"
    DELIVER = "delivering"
    WAIT = "waiting for the device"
    COMMIT = "committing"
    BETWEEN = "between turns"


_PART_OF = {
    Phase.ADMIT: Part.ADMIT,
    Phase.PLAN: Part.LAUNCH,
    Phase.LAUNCH: Part.LAUNCH,
    Phase.DELIVER: Part.DELIVER,
    Phase.COMMIT: Part.COMMIT,
    Phase.FINALIZE: Part.COMMIT,
    None: Part.BETWEEN,
}


class Spent(NamedTuple):
    """A stretch of the host's time: milliseconds by Part, in its order, and how much of them was
    garbage collection.
    """

    parts: tuple[float, ...] = (0.0,) * len(Part)
    collected_ms: float = 0.0


class StepRecord(NamedTuple):
    """One committed step.

    Attributes:
        ready_ns: when its results were on the host, nanoseconds. end_ns: when its commit returned.
        kind: decode or prefill.
        rows: its rows, zombies included. zombies: of them, those whose sequence had ended.
        context: tokens that each of its rows attends to, on average. longest: that the row with the
            most of them does.
        device_us: how long it ran on the device; None without timing.
        gap_us: how long the device was idle before it; None without timing, and for the first one.
        spent: what the host did in its period. ahead: what it did from the launch before to this
            step's, for which the device may wait.
    """

    ready_ns: int
    end_ns: int
    kind: StepKind
    rows: int
    zombies: int
    context: float
    longest: int
    device_us: float | None
    gap_us: float | None
    spent: Spent
    ahead: Spent

    @property
    def dead(self) -> bool:
        return self.zombies == self.rows

    def steady(self, streams: int) -> bool:
        """Whether it is a decode step of a batch that is as full as it gets."""
        return self.kind is StepKind.DECODE and not self.dead and self.rows >= STEADY_ROWS * streams


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

        At depth 1 the host's part of a step follows the device's: its period ends with its commit.
        At depth 2 the device's parts follow each other; the host's, which may be a large step's
        beside a small one, is not to be counted: a period ends with the results.
        """
        stamps = [step.end_ns if self.depth == 1 else step.ready_ns for step in self.steps]
        return [
            (step, (after - before) / 1e6)
            for step, before, after in zip(
                self.steps, [self.begin_ns, *stamps], stamps, strict=False
            )
        ]

    def counted_ms(self) -> list[tuple[StepRecord, float]]:
        """The same up to the last step that brought a token: what `wall_s` is made of.

        Behind it zombies may run.
        """
        last = max((i for i, step in enumerate(self.steps) if not step.dead), default=-1)
        return self.intervals_ms()[: last + 1]


class StepRecorder:
    """Implements `photon_ext.runtime.probe.Probe`: writes a StepLog of the one pipeline that
    works; ten clock readings a step.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._open: list[Phase] = []
        self._ready_ns = 0
        self._committed: tuple[Step, int] | None = None
        self._launches: dict[int, tuple[float, int, Spent]] = {}
        self._spent = dict.fromkeys(Part, 0)  # nanoseconds since the first launch
        self._part, self._since = Part.BETWEEN, 0
        self._collected_ns = self._collecting_ns = 0
        self._periods, self._leads = _Stretches(), _Stretches()
        self._period = Spent()

    def turn(self, phase: Phase | None) -> None:
        """See Probe.turn."""
        self._enter(_PART_OF[phase])

    def begin(self, phase: Phase, step: int | None) -> None:
        """See Probe.begin."""
        self._open.append(phase)
        if phase is Phase.WAIT:
            self._enter(Part.WAIT)
        elif phase is Phase.PLAN and not self._log.begin_ns:
            self._since = self._log.begin_ns = time.perf_counter_ns()
            self._spent, self._collected_ns = dict.fromkeys(Part, 0), 0

    def end(self) -> None:
        """See Probe.end."""
        phase = self._open.pop() if self._open else None
        if phase is Phase.WAIT:
            self._ready_ns = self._enter(Part.COMMIT)
            if self._log.depth > 1:
                self._period = self._cut(self._periods)
        elif phase is Phase.COMMIT and self._committed is not None:
            self._record(*self._committed)
            self._committed = None

    def launched(self, step: Step, words: int) -> None:
        """See Probe.launched.

        The device works on the step already: what is counted here delays nobody.
        """
        self._enter(self._part)
        positions = [segment.position for segment in step.segments]
        self._launches[step.index] = (
            sum(positions) / len(positions),
            max(positions),
            self._cut(self._leads),
        )

    def committed(self, step: Step, zombies: int) -> None:
        """See Probe.committed."""
        self._committed = step, zombies

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """A callback of `gc`."""
        if phase == "start":
            self._collecting_ns = time.perf_counter_ns()
        else:
            self._collected_ns += time.perf_counter_ns() - self._collecting_ns

    def _enter(self, part: Part) -> int:
        now = time.perf_counter_ns()
        self._spent[self._part] += now - self._since
        self._part, self._since = part, now
        return now

    def _cut(self, stretches: _Stretches) -> Spent:
        return stretches.cut(list(self._spent.values()), self._collected_ns)

    def _record(self, step: Step, zombies: int) -> None:
        end_ns = self._enter(Part.COMMIT)
        if self._log.depth == 1:
            self._period = self._cut(self._periods)
        context, longest, ahead = self._launches.pop(step.index, (0.0, 0, Spent()))
        record = StepRecord(
            ready_ns=self._ready_ns,
            end_ns=end_ns,
            kind=step.key.kind,
            rows=len(step.segments),
            zombies=zombies,
            context=context,
            longest=longest,
            device_us=None if step.span is None else step.span.length_us(),
            gap_us=step.gap_us,
            spent=self._period,
            ahead=ahead,
        )
        self._log.steps.append(record)


class _Stretches:
    """Cuts sums that grow into one stretch after the other."""

    def __init__(self) -> None:
        self._parts_ns, self._collected_ns = [0] * len(Part), 0

    def cut(self, parts_ns: list[int], collected_ns: int) -> Spent:
        """What was added since the last call; arguments are the sums up to now, nanoseconds."""
        parts = tuple(
            (now - before) / 1e6 for now, before in zip(parts_ns, self._parts_ns, strict=True)
        )
        collected_ms = (collected_ns - self._collected_ns) / 1e6
        self._parts_ns, self._collected_ns = parts_ns, collected_ns
        return Spent(parts, collected_ms)


@contextmanager
def logged_steps(depth: int) -> Iterator[StepLog]:
    """Logs the steps of the one pipeline, of that depth, that works in the block.

    Raises BenchmarkError while a timeline is recorded.
    """
    if probe.active is not None:
        raise BenchmarkError(
            "a timeline is being recorded, and its records slow steps down; end it first"
        )
    log = StepLog(depth=depth)
    recorder = StepRecorder(log)
    gc.collect()  # what an earlier run left is not collected in this one
    gc.callbacks.append(recorder.collected)
    probe.active = recorder
    try:
        yield log
    finally:
        probe.active = None
        gc.callbacks.remove(recorder.collected)
