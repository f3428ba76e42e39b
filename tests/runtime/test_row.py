"""A row's life: running, draining, finished, released once, never while a step in flight uses it
(I3, I4); what it counts is launched, by itself or by the batch it decodes in.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_ext.errors import PipelineError
from photon_ext.row_params import RowParams
from photon_ext.runtime.decode_batch import DecodeBatch
from photon_ext.runtime.row import NEVER, Row, RowState
from photon_ext.runtime.running_set import RunningSet

RUNNING, DRAINING, FINISHED, RELEASED = RowState


@pytest.fixture
def row() -> Row:
    return Row(3, 7, (3,), (10, 11, 12), RowParams(4))


def test_a_row_lives_once(row: Row) -> None:
    seen = [(row.running, row.delivers)]
    for state in (DRAINING, FINISHED, RELEASED):
        row.move(state)
        assert row.state is state
        seen.append((row.running, row.delivers))
    assert seen == [(True, True), (False, True), (False, False), (False, False)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), RUNNING),
        ((), RELEASED),
        ((DRAINING,), RUNNING),
        ((DRAINING,), DRAINING),
        ((DRAINING,), RELEASED),
        ((FINISHED,), RUNNING),
        ((FINISHED,), DRAINING),
        ((FINISHED,), FINISHED),
        ((FINISHED, RELEASED), RUNNING),
        ((FINISHED, RELEASED), FINISHED),
        ((FINISHED, RELEASED), RELEASED),
    ],
)
def test_i4_no_other_way_leads_to_a_state(
    row: Row, before: tuple[RowState, ...], after: RowState
) -> None:
    for state in before:
        row.move(state)
    with pytest.raises(
        PipelineError, match=rf"Row\(3, generation 7, {row.state.value}, .*become {after.value}"
    ):
        row.move(after)
    assert row.state is (before[-1] if before else RUNNING)


def test_a_row_counts_what_was_launched_by_itself_and_by_its_batches(row: Row) -> None:
    assert (row.launched, row.last_step, row.next_position) == (0, NEVER, 0)
    row.launch_chunk(5, 2)
    assert (row.prefilled, row.launched, row.last_step, row.next_position) == (2, 0, 5, 2)
    assert (row.wants_prefill, row.wants_decode) == (True, False)
    row.launch_chunk(6, 1)
    assert (row.prefilled, row.launched, row.last_step, row.next_position) == (3, 1, 6, 3)
    assert (row.wants_prefill, row.wants_decode) == (False, True)
    batch = DecodeBatch((row,), 1)
    for step in (8, 9):
        batch.launch(step)
    assert (row.launched, row.last_step, row.next_position) == (3, 9, 5)
    DecodeBatch((row,), 1)
    batch.launch(10)  # no more its own
    assert (row.launched, row.last_step, row.next_position) == (3, 9, 5)


def test_a_row_counts_what_is_committed_also_of_epochs_that_it_has_left(row: Row) -> None:
    row.launch_chunk(0, 3)
    row.commit_first()
    epoch = DecodeBatch((row,), 1).epoch
    other = DecodeBatch((row,), 1)  # of an epoch of its own, as behind an interrupt
    epoch.launches += 1  # without the row
    other.launch(1)
    assert (row.committed, row.launched) == (1, 2)
    row.join(None)
    assert (row.committed, row.launched) == (1, 2)
    epoch.commits += 1
    assert row.committed == 1
    other.epoch.commits += 1
    assert row.committed == 2
    row.join(epoch)
    assert (row.committed, row.launched, row._left) == (2, 2, ())


def test_a_row_that_may_get_two_tokens_a_step_counts_back_what_it_did_not_get() -> None:
    running, row = RunningSet(), Row(1, 1, (1,), (1, 2), RowParams(4), capacity=5, step_tokens=2)
    running.add(row)
    row.launch_chunk(0, 2)
    running.prompt_done(row)
    row.commit_first()
    batch = DecodeBatch(running.decode, 1)
    assert (row.steps_left, batch.limit) == (2, 2)
    for step in (1, 2):
        batch.launch(step)
    running.covered(batch.due())
    assert (row.launched, running.decode) == (5, ())
    for _ in range(2):
        batch.epoch.commits += 1
        running.recount(row, 1)
    assert (row.committed, row.launched, row.steps_left) == (3, 3, 1)
    assert running.decode == (row,)


def test_a_row_whose_cap_is_covered_or_that_ended_wants_nothing(row: Row) -> None:
    row.launch_chunk(0, 3)
    batch = DecodeBatch((row,), 1)
    for step in range(1, 4):
        assert row.wants_decode
        assert batch.ready
        batch.launch(step)
    assert (row.launched, row.wants_decode, batch.ready) == (4, False, False)
    for state in (DRAINING, FINISHED):
        other = Row(1, 1, (1,), (1,), RowParams(4))
        other.move(state)
        assert not other.wants_prefill
        other.launch_chunk(0, 1)
        assert not other.wants_decode


def test_a_batch_is_columns_of_its_rows_and_padding() -> None:
    rows = tuple(
        Row(index, 10 + index, (0,), (1,) * index, RowParams(9, constrained=index == 4))
        for index in (4, 2)
    )
    for row in rows:
        row.launch_chunk(0, row.index)
    batch = DecodeBatch(rows, 3)
    named = [*zip(batch.indices, batch.generations, strict=True)]
    assert named == [(4, 14), (2, 12)]
    assert batch.constrained == (0,)
    assert batch.words.tolist() == [4, 0, 1, 1, 2, 1, 1, 1, 0, 0, 0, 0]
    assert batch.limit == 8


@pytest.mark.parametrize("case", ["twice", "prefilling", "ended"])
def test_a_batch_takes_no_row_over_where_one_cannot_ride(case: str) -> None:
    rows = [Row(index, 1, (0,), (1, 2), RowParams(9)) for index in (1, 2)]
    for row in rows:
        row.launch_chunk(0, 1 if case == "prefilling" and row is rows[1] else 2)
    before = DecodeBatch((rows[0],), 1)
    if case == "ended":
        rows[1].move(FINISHED)
    named = (rows[0], rows[1], rows[0]) if case == "twice" else tuple(rows)
    message = "names a row twice" if case == "twice" else r"Row\(2, .* has no token to decode"
    with pytest.raises(PipelineError, match=message):
        DecodeBatch(named, 4)
    assert rows[0].epoch is before.epoch
    assert before.ready


def test_a_batch_that_a_row_leaves_or_ends_in_is_not_ready(row: Row) -> None:
    row.launch_chunk(0, 3)
    running_set = RunningSet()
    running_set.add(row)
    first = DecodeBatch((row,), 1)
    second = DecodeBatch((row,), 1)
    assert (first.ready, second.ready) == (False, True)
    running_set.finish(row)
    assert not second.ready


@pytest.mark.parametrize("case", ["twice", "ended", "full"])
def test_a_row_that_stays_in_its_column_is_refused_where_it_cannot_ride(case: str) -> None:
    rows = [Row(index, 1, (0,), (1, 2), RowParams(9), capacity=5) for index in (1, 2, 3)]
    for row in rows:
        row.launch_chunk(0, 2)
    before = DecodeBatch((rows[0], rows[1]), 2)
    for step in range(1, 4 if case == "full" else 2):
        before.launch(step)
    if case == "ended":
        rows[1].move(FINISHED)
        rows[1].join(None)
    rows[0].capacity = 9
    message = {
        "twice": "names a row twice",
        "ended": r"Row\(2, .* has no token to decode",
        "full": r"Row\(2, .* has no page for position 5",
    }
    with pytest.raises(PipelineError, match=message[case]):
        DecodeBatch((*rows[:2], rows[1 if case == "twice" else 2]), 4, before)
    assert (rows[0].epoch, rows[2].epoch) == (before.epoch, None)


@given(st.data())
def test_a_batch_that_follows_another_is_as_one_made_anew(data: st.DataObject) -> None:
    """Rows join, leave, change places, get pages and are launched, in any order."""
    rows = [
        Row(i, 7, (0,), (1,) * i, RowParams(6, constrained=i % 3 == 0, logprobs=i % 2 or None))
        for i in range(1, 7)
    ]
    for row in rows:
        row.launch_chunk(0, row.index)
        row.capacity = row.index + data.draw(st.integers(1, 5))
    batch: DecodeBatch | None = None
    counted = dict.fromkeys(rows, 1)
    for step in range(1, 8):
        fit = [row for row in rows if row.wants_decode and row.next_position < row.capacity]
        named = data.draw(st.lists(st.sampled_from(fit), min_size=1, unique=True)) if fit else []
        if not named:
            break
        batch = DecodeBatch(tuple(named), 8, batch)
        assert batch.indices.tolist() == [row.index for row in named]
        assert batch.words.tolist() == [
            *(word for i, row in enumerate(named) for word in (row.index, i, 1, 1)),
            *[0] * 4 * (8 - len(named)),
        ]
        assert batch.constrained == tuple(i for i, row in enumerate(named) if row.index % 3 == 0)
        assert batch.logprobs == tuple(i for i, row in enumerate(named) if row.index % 2)
        for _ in range(data.draw(st.integers(1, batch.limit - batch.epoch.launches))):
            assert batch.ready
            batch.launch(step)
            counted.update({row: counted[row] + 1 for row in named})
        assert {row: row.launched for row in rows} == counted
        left = {row: min(6 - row.launched, row.capacity - row.next_position) for row in named}
        # who got pages since its column was written may be looked at too early, never too late
        assert {row for row in named if not left[row]} <= {*batch.due()}
        assert batch.ready == (not batch.due())
        for row in data.draw(st.lists(st.sampled_from(rows), unique=True)):
            row.capacity += 2


def test_who_leaves_a_running_set_gives_its_place_to_the_last() -> None:
    running_set, rows = RunningSet(), [Row(i, 1, (i,), (1,), RowParams(9)) for i in range(1, 5)]
    for row in rows:
        running_set.add(row)
        row.launch_chunk(0, 1)
        running_set.prompt_done(row)
    assert running_set.decode == tuple(rows)
    running_set.finish(rows[1])
    assert running_set.decode == (rows[0], rows[3], rows[2])
    assert running_set.decode is running_set.decode
    running_set.finish(rows[2], DRAINING)
    assert running_set.decode == (rows[0], rows[3])
    assert running_set.ended == {rows[1]}


def test_a_running_set_tells_whether_a_row_has_no_page_for_its_token() -> None:
    running_set, row = RunningSet(), Row(1, 1, (1,), (1, 2), RowParams(9), capacity=3)
    running_set.add(row)
    row.launch_chunk(0, 2)
    running_set.prompt_done(row)
    batch = DecodeBatch(running_set.decode, 1)
    assert not running_set.lacks_pages
    batch.launch(1)
    running_set.covered(batch.due())
    assert running_set.lacks_pages
    row.capacity = 4
    assert not running_set.lacks_pages


def test_i4_a_running_set_gives_up_a_row_once_and_not_while_a_step_holds_it(row: Row) -> None:
    running_set = RunningSet()
    running_set.add(row)
    row.launch_chunk(2, 3)
    assert running_set.take_unused(9) == []
    running_set.finish(row, DRAINING)
    running_set.finish(row)
    assert running_set.take_unused(1) == []
    assert running_set.holds(row)
    assert running_set.take_unused(2) == [row]
    assert (row.state, running_set.holds(row), bool(running_set)) == (RELEASED, False, False)
    assert running_set.take_unused(3) == []


@given(st.lists(st.sampled_from(RowState), max_size=12))
def test_no_sequence_of_moves_releases_early_or_twice(moves: list[RowState]) -> None:
    row, states = Row(1, 1, (1,), (1,), RowParams(1)), [RUNNING]
    for state in moves:
        try:
            row.move(state)
        except PipelineError:
            assert row.state is states[-1]
            continue
        states.append(state)
    order = list(RowState)
    places = [order.index(state) for state in states]
    assert places == sorted(set(places)), "each state at most once, and forward only"
    assert RELEASED not in states or states[-2] is FINISHED
