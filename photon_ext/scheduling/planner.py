"""Who gets a row, and who rides in the next step. The planner sees who waits, by rank, rows,
free pages and the token budget of a step, and returns data that the pipeline executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from photon_ext.runtime import StepKind, StepPlan
from photon_ext.runtime.default_plan import first_come_first_served
from photon_ext.runtime.roster import Roster
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence


class Planner:
    """Rows and pages by rank (see policy.py), steps first come, first served."""

    def __init__(self, scheduler: Scheduler, roster: Roster, budget: int) -> None:
        """`roster`: the pipeline's rows. `budget`: prompt tokens that one step may carry."""
        self._scheduler = scheduler
        self._roster = roster
        self._budget = budget

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
        """Whose turn it is, of at least one that waits, by rank: the first."""
        return waiting[0]

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who gives its row up, of at least one that runs: the last of the same order, which
        never changes: no two requests preempt each other in turns.
        """
        return max(running, key=attrgetter("rank"))

    def plan(self, previous: StepKind | None) -> StepPlan:
        """The next step; empty where no row has anything to launch. `previous`: the last kind."""
        return first_come_first_served(self._roster, previous, self._budget) or StepPlan()
