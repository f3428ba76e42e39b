"""Which rows ride where nobody plans: order, chunks, caps, and the turns of prefill and decode."""

from __future__ import annotations

from photon_ext.row_params import RowParams
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.runtime.default_plan import first_come_first_served, take_chunks
from photon_ext.runtime.row import Row, RowState
from photon_ext.runtime.running_set import RunningSet
from photon_ext.runtime.step import StepKind, StepPlan

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL


def row(index: int, prompt: int = 3, cap: int = 4, prefilled: int = 0) -> Row:
    made = Row(index, 1, (index,), tuple(range(prompt)), RowParams(cap))
    if prefilled:
        made.launch_chunk(0, prefilled)
    return made


def running(index: int, sampled: int = 1, cap: int = 4) -> Row:
    made = row(index, cap=cap, prefilled=3)
    if sampled > 1:
        batch = DecodeBatch((made,), 1)
        for step in range(sampled - 1):
            batch.launch(1 + step)
    return made


def running_set_of(*rows: Row) -> RunningSet:
    running_set = RunningSet()
    for one in rows:
        running_set.add(one)
        if not one.wants_prefill:
            running_set.prompt_done(one)
    return running_set


def served(running_set: RunningSet, previous: StepKind | None, budget: int) -> StepPlan:
    return first_come_first_served(running_set.decode, running_set.prefill, previous, budget)


def plan(*rows: Row, previous: StepKind | None = None, budget: int = 8) -> StepPlan:
    return served(running_set_of(*rows), previous, budget)


def test_nothing_to_do_is_no_step() -> None:
    assert plan() == StepPlan()


def test_prompts_of_several_rows_share_a_step_in_order_of_admission() -> None:
    rows = row(2), row(1), row(3, prompt=9)
    assert plan(*rows) == StepPlan((), ((rows[0], 3), (rows[1], 3), (rows[2], 2)))


def test_a_chunk_continues_where_the_last_one_ended() -> None:
    long = row(1, prompt=9, prefilled=4)
    assert plan(long, previous=PREFILL, budget=4) == StepPlan((), ((long, 4),))
    long.launch_chunk(1, 4)
    assert plan(long, previous=PREFILL, budget=4) == StepPlan((), ((long, 1),))


def test_chunks_are_taken_in_order_until_the_budget_is_spent() -> None:
    rows = row(1, prompt=5, prefilled=2), row(2, prompt=5), row(3)
    assert take_chunks(rows, 1) == ((rows[0], 1),)
    assert take_chunks(rows, 3) == ((rows[0], 3),)
    assert take_chunks(rows, 7) == ((rows[0], 3), (rows[1], 4))
    assert take_chunks(rows, 99) == ((rows[0], 3), (rows[1], 5), (rows[2], 3))


def test_rows_whose_prompts_are_done_decode_together() -> None:
    rows = running(1, sampled=2), running(4)
    assert plan(*rows, previous=DECODE) == StepPlan(rows, ())


def test_quiet_steps_have_the_same_tuple() -> None:
    """By which the pipeline sees, without a look at its rows, that nothing has changed."""
    running_set = running_set_of(running(1), running(2), row(3))
    first = served(running_set, PREFILL, 8)
    second = served(running_set, PREFILL, 8)
    assert first is not None
    assert second is not None
    assert first.decode is second.decode
    running_set.finish(running_set.decode[0])
    third = served(running_set, PREFILL, 8)
    assert third is not None
    assert [one.index for one in third.decode] == [2]


def test_prefill_and_decode_take_turns_when_both_wait() -> None:
    decoding, prefilling = running(1, cap=100), row(2, prompt=100)
    kinds, previous = [], None
    for _ in range(6):
        planned = plan(decoding, prefilling, previous=previous, budget=4)
        assert planned is not None
        assert bool(planned.decode) != bool(planned.chunks)
        previous = PREFILL if planned.chunks else DECODE
        kinds.append(previous)
        for chunk in planned.chunks:
            chunk.row.launch_chunk(len(kinds), chunk.num_tokens)
    assert kinds == [PREFILL, DECODE] * 3


def test_prefill_goes_on_when_nothing_decodes() -> None:
    long = row(1, prompt=9, prefilled=4)
    assert plan(long, previous=PREFILL, budget=4) == StepPlan((), ((long, 4),))


def test_hazard_9_a_cap_covered_by_steps_in_flight_is_not_launched() -> None:
    assert plan(running(1, sampled=4, cap=4), previous=DECODE) == StepPlan()
    assert plan(running(1, sampled=1, cap=1), previous=PREFILL) == StepPlan()
    left = running(2, sampled=3, cap=4)
    assert plan(running(1, sampled=4, cap=4), left, previous=DECODE) == StepPlan((left,), ())


def test_ended_rows_do_not_ride() -> None:
    for state in (RowState.DRAINING, RowState.FINISHED):
        ended, waiting = running(1), row(2)
        running_set = running_set_of(ended, waiting)
        running_set.finish(ended, state)
        running_set.finish(waiting, state)
        assert served(running_set, None, 8) == StepPlan()


def test_hazard_27_every_chunk_but_the_last_leaves_some_of_the_prompt() -> None:
    for budget in range(1, 12):
        long, left = row(1, prompt=10), []
        while planned := plan(long, previous=PREFILL, budget=budget):
            if not planned.chunks:
                break
            long.launch_chunk(0, planned.chunks[0].num_tokens)
            left.append(long.wants_prefill)
            assert long.launched == (not long.wants_prefill)
        assert left == [True] * (len(left) - 1) + [False]


def test_a_row_still_prefilling_does_not_decode() -> None:
    decoding = running(2)
    planned = plan(row(1, prompt=9, prefilled=4), decoding, previous=PREFILL, budget=4)
    assert planned == StepPlan((decoding,), ())
