"""Who gets a row, and who is scheduled in the next step. The planner sees who waits, by rank, rows,
free pages and the token budget of a step, and returns data that the pipeline executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Generic

from photon_ext.runtime import Chunk, Row, StepKind, StepPlan
from photon_ext.runtime.default_plan import first_come_first_served, take_chunks
from photon_ext.runtime.running_set import RunningSet
from photon_ext.scheduling.pager import Grant, Growth
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, Sink
from photon_ext.scheduling.step_times import StepLoad
from photon_ext.scheduling.token_budget import TokenBudget

_NO_GROWTH = Growth()
ADMISSIONS = 16  # in a turn: more prompts than a step takes, and about a millisecond of work


class Planner(Generic[Sink]):
    """Rows and pages by rank (see policy.py), steps first come, first served."""

    def __init__(
        self,
        scheduler: Scheduler[Sink],
        running_set: RunningSet,
        budget: int,
        mixed: TokenBudget | None = None,
    ) -> None:
        """`running_set`: the pipeline's rows. `budget`: prompt tokens of a prefill step. `mixed`:
        the tokens of mixed steps; None: prefill and decode steps take turns.
        """
        self._scheduler = scheduler
        self._running_set = running_set
        self._budget = budget
        self._mixed = mixed

    def admissions(self) -> Iterator[tuple[Sequence[Sink], Grant]]:
        """Sequences to admit now, with their pages, by rank, until one has to go on waiting: nobody
        overtakes it, so that a long prompt is not starved. Only who waits for another to write its
        pages, or for its adapter to come into a slot, is overtaken. Of many that come at once the
        next turns admit the rest, so that the device does not wait for all of them before its first
        step.
        """
        scheduler = self._scheduler
        scheduler.recall()
        most = min(scheduler.max_rows, scheduler.rows_held + ADMISSIONS)
        while scheduler.waiting and scheduler.rows_held < most:
            sequence = scheduler.waiting[0]
            if scheduler.must_wait(sequence):
                return
            if scheduler.defer(sequence):
                continue
            grant = scheduler.schedule(sequence)
            if grant is None:
                return
            yield sequence, grant

    def victim(self, running: Iterable[Sequence[Sink]]) -> Sequence[Sink]:
        """Who gives its row up, of at least one that runs: the last of the same order, which
        never changes: no two requests preempt each other in turns.
        """
        return max(running, key=attrgetter("rank"))

    def plan(self, previous: StepKind | None) -> StepPlan:
        """The next step; empty where no row has anything to launch. `previous`: the last kind."""
        growth = self._scheduler.grow() if self._running_set.lacks_pages else _NO_GROWTH
        decode, prefill = self._running_set.decode, self._running_set.prefill
        if not (prefill or growth.appends or growth.stalled):
            return StepPlan(decode)  # as nearly always
        drains: tuple[Row, ...] = ()
        if growth.stalled:
            drains = self._victims()
            left_out = {*growth.stalled, *drains}
            decode = tuple(row for row in decode if row not in left_out)
            prefill = tuple(row for row in prefill if row not in left_out)
        chunks: tuple[Chunk, ...] = ()
        if self._mixed is None:
            plan = first_come_first_served(decode, prefill, previous, self._budget)
            decode, chunks = plan.decode, plan.chunks
        elif prefill:
            left = (len(row.prompt_ids) - row.prefilled for row in prefill)
            features = self._mixed.features(decode, prefill)
            tokens = self._mixed.prompt_tokens(len(decode), len(prefill), left, features)
            chunks = self._mixed.fitting(len(decode), take_chunks(prefill, tokens))
        return StepPlan(decode, chunks, growth.appends, drains)

    def _victims(self) -> tuple[Row, ...]:
        """The row that leaves, so that others get pages; none while one is leaving anyway."""
        running = self._scheduler.running
        if len(running) < self._scheduler.rows_held:
            return ()
        victim = self.victim(running)
        assert victim.row is not None
        return (victim.row,)

    def timed(self, load: StepLoad) -> None:
        """A step of this load was timed. Mixed steps learn from it."""
        if self._mixed is not None:
            self._mixed.timed(load)
