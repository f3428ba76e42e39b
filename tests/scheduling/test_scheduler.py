"""Scheduler: first come, first served; what can never fit fails alone; one registry; pages add
up.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.errors import RequestError
from photon_ext.runtime import Row
from photon_ext.runtime.row import RowState
from photon_ext.scheduling import PagePool, Pager, Scheduler, Sequence, SequenceState
from tests.scheduling.sequences import make_sequence

PAGE, ROWS, MAX_LEN, PAGES = 4, 3, 32, 10


def make_scheduler() -> Scheduler:
    pager = Pager(PagePool(PAGES), PAGE, share=False)
    return Scheduler(pager, ROWS, MAX_LEN)


def pages_of(sequence: Sequence) -> int:
    """Pages for its length cap."""
    return -(-sequence.admission.kv_len // PAGE)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, admits, cancels and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.zombies: list[Sequence] = []
        self.released: list[Sequence] = []
        self.admitted = 0

    @rule(prompt=st.integers(1, 20), new=st.integers(1, 12))
    def add(self, prompt: int, new: int) -> None:
        sequence = make_sequence(prompt, self.scheduler.fit(prompt, new))
        self.scheduler.registry.add([sequence])
        self.scheduler.add(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(admitted=st.booleans())
    def admit(self, admitted: bool) -> None:
        sequence = self.scheduler.waiting[0]
        assert sequence is self.waiting[0], "nobody overtakes"
        needed, room = pages_of(sequence), self.scheduler.pool.free - self.owed()
        grant = self.scheduler.schedule(sequence)
        if grant is None:
            assert len(self.running) + len(self.zombies) == ROWS or needed > room, (
                "the first in line waits only while no row or not enough pages are free"
            )
            return
        assert len(grant.pages) == needed or needed > room
        assert min(needed, len(sequence.admission.prompt_ids) // PAGE + 1) <= len(grant.pages)
        if not admitted:
            self.scheduler.cancel(sequence, grant)
            assert self.scheduler.waiting[0] is sequence
            return
        self.admitted += 1
        prompt, params, _ = sequence.admission
        row = Row(1, self.admitted, tuple(grant.pages), prompt, params)
        self.scheduler.admit(sequence, row, grant)
        self.running.append(self.waiting.pop(0))

    def owed(self) -> int:
        """Pages that rows lack for their caps."""
        in_rows = [*self.running, *self.zombies]
        return sum(pages_of(one) - len(one.row.pages) for one in in_rows if one.row)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.waiting, *self.running]))
        assert self.scheduler.registry.find(sequence.id) is sequence
        self.scheduler.finish(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.released.append(sequence)
        else:
            self.running.remove(sequence)
            assert sequence.row is not None
            sequence.row.move(RowState.FINISHED)  # as the pipeline does
            self.zombies.append(sequence)
        assert self.scheduler.registry.find(sequence.id) is None

    @precondition(lambda self: self.zombies)
    @rule()
    def release(self) -> None:
        sequence = self.zombies.pop(0)
        assert sequence.row is not None
        assert self.scheduler.sequence_of(sequence.row) is sequence
        sequence.row.move(RowState.RELEASED)
        self.scheduler.release(sequence.row)
        self.released.append(sequence)

    @invariant()
    def everything_adds_up(self) -> None:
        pool, in_rows = self.scheduler.pool, [*self.zombies, *self.running]
        held = [page for sequence in in_rows if sequence.row for page in sequence.row.pages]
        assert len(held) == len(set(held)) == pool.held
        assert pool.free + pool.held == PAGES
        assert self.scheduler.rows_held == len(in_rows)
        assert set(self.scheduler.registry.live) == {*self.waiting, *self.running}
        assert list(self.scheduler.waiting) == self.waiting

    @invariant()
    def states_are_those_of_one_machine(self) -> None:
        for sequences, state in (
            (self.waiting, SequenceState.WAITING),
            (self.running, SequenceState.RUNNING),
            (self.zombies, SequenceState.FINISHED),
            (self.released, SequenceState.RELEASED),
        ):
            assert {sequence.state for sequence in sequences} <= {state}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.fit(33, 4), "prompt has 33 tokens and the context holds 32"),
        (
            lambda s: Scheduler(Pager(PagePool(4), PAGE), ROWS, MAX_LEN).fit(12, 8),
            "need 5 pages of 4 tokens and the pool has 4",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_its_numbers(
    ask: Callable[[Scheduler], object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(make_scheduler())


def test_the_cap_is_cut_to_the_context() -> None:
    scheduler = make_scheduler()
    assert scheduler.fit(10, 5) == 5
    assert scheduler.fit(30, 5) == 3, "the last token needs no KV entry"
    assert scheduler.fit(32, 5) == 1


def test_a_request_may_take_the_last_page_to_its_last_place() -> None:
    """The last token's keys are never written: 7 + 14 tokens are 20 entries, which are 5 pages."""
    scheduler = Scheduler(Pager(PagePool(5), PAGE), ROWS, MAX_LEN)
    assert scheduler.fit(7, 14) == 14
    scheduler.registry.add([sequence := make_sequence(7, 14)])
    scheduler.add(sequence)
    grant = scheduler.schedule(sequence)
    assert grant is not None
    assert len(grant.pages) == 5
    with pytest.raises(RequestError, match="need 6 pages of 4 tokens and the pool has 5"):
        scheduler.fit(7, 15)
