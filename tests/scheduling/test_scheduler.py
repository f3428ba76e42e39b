"""Scheduler: first come, first served; what can never fit fails alone; one registry; pages add
up.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.errors import RequestError
from photon_ext.runtime import Lease, Row
from photon_ext.scheduling import PagePool, Request, Scheduler, Sequence, SequenceState, TextStream

PAGE, ROWS, MAX_LEN, PAGES = 4, 3, 32, 10


def make_sequence(prompt: int, new: int) -> Sequence:
    return Sequence(
        tuple(range(1, prompt + 1)),
        new,
        (),
        0.0,
        0,
        None,
        TextStream(None),
        Request(lambda request: None),
    )


def make_scheduler() -> Scheduler:
    return Scheduler(PagePool(PAGES), PAGE, ROWS, MAX_LEN)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, admits, cancels and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.zombies: list[Row] = []
        self.admitted = 0

    @rule(prompt=st.integers(1, 20), new=st.integers(1, 12))
    def add(self, prompt: int, new: int) -> None:
        sequence = make_sequence(prompt, self.scheduler.fit(prompt, new))
        self.scheduler.add(sequence)
        self.waiting.append(sequence)

    @rule(admitted=st.booleans())
    def admit(self, admitted: bool) -> None:
        taken = self.scheduler.take()
        if taken is None:
            assert (
                not self.waiting
                or len(self.running) + len(self.zombies) == ROWS
                or self.scheduler.pages_for(self.waiting[0].max_step_tokens)
                > self.scheduler.pool.free
            ), "the first in line waits only while no row or not enough pages are free"
            return
        sequence, pages = taken
        assert sequence is self.waiting[0], "nobody overtakes"
        assert len(pages) * PAGE >= sequence.max_step_tokens
        if not admitted:
            self.scheduler.give_back(sequence, pages)
            return
        self.admitted += 1
        self.scheduler.place(
            sequence,
            Row(
                Lease(1, self.admitted, tuple(pages)),
                sequence.prompt_ids,
                sequence.max_new_tokens,
                False,
            ),
        )
        self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.waiting, *self.running]))
        assert self.scheduler.find(sequence.request) is sequence
        self.scheduler.drop(sequence)
        sequence.end()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            assert sequence.row is not None
            self.zombies.append(sequence.row)
        assert self.scheduler.find(sequence.request) is None

    @precondition(lambda self: self.zombies)
    @rule()
    def release(self) -> None:
        self.scheduler.release(self.zombies.pop(0))

    @invariant()
    def everything_adds_up(self) -> None:
        pool = self.scheduler.pool
        held = [page for row in self.zombies for page in row.lease.pages]
        held += [
            page for sequence in self.running if sequence.row for page in sequence.row.lease.pages
        ]
        assert len(held) == len(set(held)) == pool.held
        assert pool.free + pool.held == PAGES
        assert set(self.scheduler.live) == {*self.waiting, *self.running}
        assert self.scheduler.waiting == len(self.waiting)
        assert all(sequence.state is SequenceState.RUNNING for sequence in self.running)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.fit(0, 4), "prompt is empty"),
        (lambda s: s.fit(33, 4), "prompt has 33 tokens and the context holds 32"),
        (
            lambda s: Scheduler(PagePool(4), PAGE, ROWS, MAX_LEN).fit(12, 8),
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
    assert scheduler.fit(30, 5) == 3, "the last token needs no KV token"
    assert scheduler.fit(32, 5) == 1


def test_a_request_may_take_the_last_page_to_its_last_place() -> None:
    """The last token's keys are never written: 7 + 14 tokens are 20 tokens, which are 5 pages."""
    scheduler = Scheduler(PagePool(5), PAGE, ROWS, MAX_LEN)
    assert scheduler.fit(7, 14) == 14
    scheduler.add(make_sequence(7, 14))
    taken = scheduler.take()
    assert taken is not None
    assert len(taken[1]) == 5
    with pytest.raises(RequestError, match="need 6 pages of 4 tokens and the pool has 5"):
        scheduler.fit(7, 15)
