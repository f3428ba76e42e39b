"""Who gets a row, and who rides in the next step. The planner sees who waits, rows, free pages and
the token budget of a step, and returns data that the pipeline executes: a policy is a change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from photon_ext.runtime import StepKind, StepPlan, StepResult
from photon_ext.runtime.default_plan import first_come_first_served, take_chunks
from photon_ext.runtime.roster import Roster
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence
from photon_ext.scheduling.token_budget import TokenBudget


class Planner:
    """First come, first served, for rows and pages and in steps."""

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

    def admissions(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Sequences to admit now, with their pages, until the one whose turn it is has to go on
        waiting: nobody overtakes it, so that a long prompt is not starved.
        """
        while waiting := self._scheduler.waiting:
            sequence = self.choose(waiting)
            pages = self._scheduler.schedule(sequence)
            if pages is None:
                return
            yield sequence, pages

    def choose(self, waiting: Seq[Sequence]) -> Sequence:
        """Whose turn it is, of at least one that waits, in order of arrival: the first."""
        return waiting[0]

    def plan(self, previous: StepKind | None) -> StepPlan:
        """The next step; empty where no row has anything to launch. `previous`: the last kind."""
        if self._mixed is None:
            return first_come_first_served(self._roster, previous, self._budget) or StepPlan()
        decode, prefill = self._roster.decode, self._roster.prefill
        if not prefill:
            return StepPlan(decode)
        return StepPlan(decode, take_chunks(prefill, self._mixed.prompt_tokens(len(decode))))

    def committed(self, result: StepResult, busy: bool) -> None:
        """A step was committed; `busy`: the pipeline has rows left. Mixed steps learn from it."""
        if self._mixed is not None:
            self._mixed.committed(result, busy)
