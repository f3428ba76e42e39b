"""Who gets a row, and who rides in the next step. The planner sees who waits, by rank, rows,
free pages and the token budget of a step, and returns data that the pipeline executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from photon_ext.runtime import Row, StepKind, StepPlan, StepResult
from photon_ext.runtime.default_plan import first_come_first_served, take_chunks
from photon_ext.runtime.roster import Roster
from photon_ext.scheduling.pager import Grant
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence
from photon_ext.scheduling.token_budget import TokenBudget


class Planner:
    """Rows and pages by rank (see policy.py), steps first come, first served."""

    def __init__(
        self,
        scheduler: Scheduler,
        roster: Roster,
        budget: int,
        mixed: TokenBudget | None = None,
    ) -> None:
        """`roster`: the pipeline's rows. `budget`: prompt tokens of a prefill step. `mixed`: the
        tokens of mixed steps; None: prefill and decode steps take turns.
        """
        self._scheduler = scheduler
        self._roster = roster
        self._budget = budget
        self._mixed = mixed

    def admissions(self) -> Iterator[tuple[Sequence, Grant]]:
        """Sequences to admit now, with their pages, until the one whose turn it is has to go on
        waiting: nobody overtakes it, so that a long prompt is not starved. Aside is who waits for
        another's pages.
        """
        scheduler = self._scheduler
        scheduler.recall()
        while scheduler.waiting and scheduler.rows_held < scheduler.max_rows:
            sequence = self.choose(scheduler.waiting)
            if scheduler.defer(sequence):
                continue
            grant = scheduler.schedule(sequence)
            if grant is None:
                return
            yield sequence, grant

    def choose(self, waiting: Seq[Sequence]) -> Sequence:
        """Whose turn it is, of at least one that waits, by rank: the first."""
        return waiting[0]

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who gives its row up, of at least one that runs: the last of the same order, which
        never changes: no two requests preempt each other in turns.
        """
        return max(running, key=attrgetter("rank"))

    def plan(self, previous: StepKind | None) -> StepPlan:
        """The next step; empty where no row has anything to launch. `previous`: the last kind."""
        growth = self._scheduler.grow()
        decode, prefill = self._roster.decode, self._roster.prefill
        drains: tuple[Row, ...] = ()
        if growth.stalled:
            drains, fed = self._victims(), {row for row, _ in growth.appends}
            decode = tuple(
                row
                for row in decode
                if (row in fed or row.next_position < row.capacity) and row not in drains
            )
            prefill = tuple(row for row in prefill if row not in drains)
        if self._mixed is None:
            plan = first_come_first_served(decode, prefill, previous, self._budget)
        elif prefill:
            tokens = self._mixed.prompt_tokens(len(decode))
            plan = StepPlan(decode, take_chunks(prefill, tokens))
        else:
            plan = StepPlan(decode)
        return plan._replace(appends=growth.appends, drains=drains)

    def _victims(self) -> tuple[Row, ...]:
        """The row that leaves, so that others get pages; none while one is leaving anyway."""
        running = self._scheduler.running
        if len(running) < self._scheduler.rows_held:
            return ()
        victim = self.victim(running)
        assert victim.row is not None
        return (victim.row,)

    def committed(self, result: StepResult, busy: bool) -> None:
        """A step was committed; `busy`: the pipeline has rows left. Mixed steps learn from it."""
        if self._mixed is not None:
            self._mixed.committed(result, busy)
