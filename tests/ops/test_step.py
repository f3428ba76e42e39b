"""The head and the tail of a step: all integers, compared bit for bit with the reference and
with cases worked out by hand.
"""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from photon_ext.layout import HOST_MASK, NO_TOKEN, ROW_COLUMNS, RecordFlag, RowColumn
from tests.ops.numeric import assert_same_bits, ints, poisoned
from tests.ops.tables import SAMPLE, STAGED, empty_step, random_step, row_state

DEAD = [0, 0, 0, 0]


def assert_same_tensors(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bits(got, wanted)


# --- begin_step_ ----------------------------------------------------------------------------------


def test_a_decode_token_carries_the_rows_last_token_over(device: str) -> None:
    state = row_state(device, {2: {RowColumn.LAST_TOKEN: 77, RowColumn.POSITION: 9}}, 4)
    step = empty_step(device, state, [[2, 0, 1, SAMPLE]], num_tokens=1)
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [[77, 9, 10, 2]]
    assert step.counts.tolist() == [1, 1, 1]


def test_a_chunk_reads_staged_ids_once(device: str) -> None:
    state = row_state(device, {1: {RowColumn.POSITION: 4}, 3: {RowColumn.LAST_TOKEN: 8}}, 4)
    step = empty_step(device, state, [[1, 0, 3, STAGED], [3, 3, 1, SAMPLE]], num_tokens=5)
    step.staged_ids[:3] = ints([50, 51, 52], device)
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [
        [50, 4, 5, 1],
        [51, 5, 6, 1],
        [52, 6, 7, 1],
        [8, 0, 1, 3],
        DEAD,
    ]
    assert step.staged_ids.tolist() == [NO_TOKEN] * 5
    assert step.counts.tolist() == [4, 4, 2]
    # the same slot again, nothing staged: the chunk is dead, and its row with it
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [DEAD, DEAD, DEAD, [8, 0, 1, 3], DEAD]
    assert step.row_state[:, RowColumn.ALIVE].tolist() == [0, 0, 0, 1]


CHUNK = STAGED | SAMPLE


@pytest.mark.parametrize(
    ("segment", "staged", "columns"),
    [
        ([1, 1, 2, CHUNK], [NO_TOKEN, NO_TOKEN], {}),  # consumed already
        ([1, 1, 2, CHUNK], [30, NO_TOKEN], {}),
        # the last token alone would do for sampling, and its context would lack a token
        ([1, 1, 2, CHUNK], [NO_TOKEN, 30], {}),
        ([1, 1, 2, STAGED], [30, NO_TOKEN], {}),
        ([1, 1, 1, SAMPLE], [30, 31], {RowColumn.LAST_TOKEN: NO_TOKEN}),
        ([1, 1, 2, SAMPLE], [30, 31], {}),  # one token cannot fill two tokens
        ([1, 1, 0, SAMPLE], [30, 31], {}),
        ([1, 1, 0, CHUNK], [30, 31], {}),
        ([1, 1, -1, CHUNK], [30, 31], {}),
        ([1, -1, 2, CHUNK], [30, 31], {}),
        ([1, 2, 2, CHUNK], [30, 31], {}),  # past the step's last token
        ([1, 2**31 - 1, 2**31 - 1, CHUNK], [30, 31], {}),
        ([1, 1, 2, CHUNK], [30, 31], {RowColumn.POSITION: -1}),
        ([1, 1, 2, CHUNK], [30, 31], {RowColumn.POSITION: 2**31 - 2}),
    ],
)
def test_a_live_row_that_cannot_be_fed_ends_and_is_never_sampled(
    device: str, segment: list[int], staged: list[int], columns: dict[RowColumn, int]
) -> None:
    """Its logits are those of another step: a token sampled from them would be recorded as if it
    were the row's.
    """
    state = row_state(
        device,
        {
            1: {RowColumn.LAST_TOKEN: 7, RowColumn.POSITION: 4, RowColumn.GENERATION: 3, **columns},
            2: {},
        },
        3,
    )
    before = state[1].tolist()
    step = empty_step(device, state, [[2, 0, 1, SAMPLE], segment], num_tokens=3)
    step.staged_ids[1:] = ints(staged, device)
    expected = step.clone()
    ops.begin_step_(*step.arguments())
    reference.begin_step_(*expected.arguments())
    assert_same_tensors(step.tensors(), expected.tensors())
    assert step.decode_meta.tolist() == [[0, 0, 1, 2], DEAD, DEAD]
    assert step.counts.tolist() == [1, 1, 1]

    stale = torch.ones(2, 50, device=device)
    errors = ints([0, 0], device)
    sampled = ops.sample(stale, step.segments, state, errors)
    record = poisoned(2, 5, dtype=torch.int32, device=device)
    ops.publish_(step.tables, record, sampled, step.segments, errors)
    assert sampled.tolist() == [0, -1]
    assert record[1].tolist() == [1, 3, 0, RecordFlag.DEAD, -1]
    before[RowColumn.ALIVE] = 0
    assert state[1].tolist() == before


def test_the_last_position_that_fits_is_fed(device: str) -> None:
    state = row_state(device, {1: {RowColumn.POSITION: 2**31 - 3}}, 2)
    step = empty_step(device, state, [[1, 0, 2, CHUNK]], num_tokens=2)
    step.staged_ids[:] = ints([-1, -2], device)  # embeddings
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [
        [-1, 2**31 - 3, 2**31 - 2, 1],
        [-2, 2**31 - 2, 2**31 - 1, 1],
    ]
    assert step.counts.tolist() == [0, 2, 1]


def test_dead_rows_and_padding_make_dead_tokens(device: str) -> None:
    state = row_state(device, {0: {}, 1: {RowColumn.ALIVE: 0}, 2: {}}, 3)
    segments = [[0, 0, 1, SAMPLE], [1, 1, 1, SAMPLE], [-7, 2, 1, SAMPLE], [3, 3, 1, SAMPLE]]
    step = empty_step(device, state, segments, num_tokens=4)
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [DEAD] * 4
    assert step.counts.tolist() == [0, 0, 0]


def test_deltas_are_applied_before_the_rows_are_read_and_only_once(device: str) -> None:
    step = empty_step(device, row_state(device, {}, 3), [[2, 0, 1, SAMPLE]], num_tokens=1)
    start = 2 * ROW_COLUMNS
    runs = [0, start, 4, 20, 1, 6, 2, 24, 2, 4, 1, 26, 6, 13, 2, 24]
    step.deltas = ints([4, 0, 0, 0, *runs, 61, 5, 100, 1, 7, 8, 9], device)
    ops.begin_step_(*step.arguments())
    assert step.row_state[2, :4].tolist() == [61, 5, 100, 1]
    assert step.page_table[2].tolist() == [7, 8, 0]
    assert step.stop_ids[2].tolist() == [9, 0]
    assert step.extension.tolist() == [[0] * 5, [0] * 5, [0, 0, 0, 7, 8]]
    assert step.decode_meta.tolist() == [[61, 5, 6, 2]]
    assert step.deltas[0] == 0
    step.row_state[2, RowColumn.POSITION] = 6
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [[61, 6, 7, 2]]


def test_the_counts_of_a_mixed_step_tell_carried_tokens_from_staged_ones(device: str) -> None:
    """A bucket of three decode tokens, of which the last is padding, then two chunks."""
    state = row_state(device, {row: {RowColumn.LAST_TOKEN: 60 + row} for row in (1, 2, 3, 4)}, 5)
    segments = [[1, 0, 1, SAMPLE], [2, 1, 1, SAMPLE], [0, 2, 1, SAMPLE]]
    segments += [[3, 3, 2, CHUNK], [4, 5, 2, STAGED], [0, 0, 0, 0]]
    step = empty_step(device, state, segments, num_tokens=9)
    step.staged_ids[3:7] = ints([50, 51, 52, 53], device)
    ops.begin_step_(*step.arguments())
    assert step.decode_meta.tolist() == [
        [61, 0, 1, 1],
        [62, 0, 1, 2],
        DEAD,
        [50, 0, 1, 3],
        [51, 1, 2, 3],
        [52, 0, 1, 4],
        [53, 1, 2, 4],
        DEAD,
        DEAD,
    ]
    assert step.counts.tolist() == [2, 7, 4]
    # nothing staged any more: the chunks are dead, and so are their rows
    ops.begin_step_(*step.arguments())
    assert step.counts.tolist() == [2, 2, 2]


@pytest.mark.parametrize("tables", [3, 8])
def test_the_last_table_of_a_list_is_written(device: str, tables: int) -> None:
    step = empty_step(device, row_state(device, {}, 2), [], num_tokens=0)
    given = step.tables[:3]
    given += [torch.zeros(2, 3, dtype=torch.int32, device=device) for _ in range(tables - 3)]
    step.deltas = ints([2, 0, 0, 0, tables - 1, 1, 2, 12, tables, 0, 2, 12, 41, 42], device)
    ops.begin_step_(given, *step.arguments()[1:])
    assert given[-1].flatten().tolist()[:4] == [0, 41, 42, 0]
    assert sum(int(table.sum()) for table in given) == 83


@pytest.mark.parametrize("count", [-1, 5, 2**31 - 1])
def test_a_wrong_number_of_runs_harms_nothing(device: str, count: int) -> None:
    step = empty_step(device, row_state(device, {1: {}}, 2), [], num_tokens=0)
    step.deltas = ints([count, 0, 0, 0, 0, 16, 1, 8, 42], device)
    expected = step.clone()
    ops.begin_step_(*step.arguments())
    reference.begin_step_(*expected.arguments())
    assert_same_tensors(step.tensors(), expected.tensors())


@pytest.mark.parametrize("seed", range(60))
def test_begin_step_equals_the_reference(device: str, seed: int) -> None:
    step = random_step(device, seed)
    expected = step.clone()
    ops.begin_step_(*step.arguments())
    reference.begin_step_(*expected.arguments())
    assert_same_tensors(step.tensors(), expected.tensors())


# --- carry_over_ids_, decode_meta_set_ ------------------------------------------------------------


@pytest.mark.parametrize(
    ("following", "prev", "idx", "expected"),
    [
        ([1, 2, 3], [10, 11, 12], [2, -1, 0], [12, 2, 10]),
        ([1], [10, 11, 12], [1], [11]),  # the batch shrinks
        ([1, 2, 3, 4], [10], [-1, 0, -1, -1], [1, 10, 3, 4]),  # it grows
        ([1, 2], [10, 11], [-1, -1], [1, 2]),  # all new
        ([1, 2], [], [-1, -1], [1, 2]),  # cold start
        ([1, 2], [10], [1, -(2**31)], [1, 2]),  # no such place
        ([], [10], [], []),
    ],
)
def test_carry_over_ids(
    device: str, following: list[int], prev: list[int], idx: list[int], expected: list[int]
) -> None:
    next_ids = ints(following, device)
    ops.carry_over_ids_(next_ids, ints(prev, device), ints(idx, device))
    assert next_ids.tolist() == expected
    by_reference = ints(following, device)
    reference.carry_over_ids_(by_reference, ints(prev, device), ints(idx, device))
    assert by_reference.tolist() == expected


def test_carry_over_ids_of_a_large_batch(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    prev = torch.randint(0, 10**6, (3000,), generator=generator).int().to(device)
    idx = torch.randint(-3, 3000, (5000,), generator=generator).int().to(device)
    actual, expected = torch.zeros_like(idx), torch.zeros_like(idx)
    ops.carry_over_ids_(actual, prev, idx)
    reference.carry_over_ids_(expected, prev, idx)
    assert_same_bits(actual, expected)


def test_decode_meta_set(device: str) -> None:
    meta = poisoned(3, 4, dtype=torch.int32, device=device)
    ops.decode_meta_set_(meta, ints([5, 6, 7], device), ints([0, -1, 9], device))
    assert meta.tolist() == [[5, 0, 1, 0], DEAD, [7, 9, 10, 2]]
    ops.decode_meta_set_(
        meta, ints([5, 6, 7], device), ints([0, 3, 2**31 - 1], device), ints([4, 4, 1], device)
    )
    assert meta.tolist() == [[5, 0, 1, 4], [6, 3, 4, 4], DEAD]
    expected = torch.zeros_like(meta)
    reference.decode_meta_set_(
        expected, ints([5, 6, 7], device), ints([0, 3, 2**31 - 1], device), ints([4, 4, 1], device)
    )
    assert_same_bits(meta, expected)


# --- publish_ -------------------------------------------------------------------------------------


def tables_of(state: torch.Tensor, stop_ids: list[list[int]]) -> list[torch.Tensor]:
    """The tables of publish_, of rows without pages."""
    pages = torch.full((len(state), 1), -1, dtype=torch.int32, device=state.device)
    return [state, pages, ints(stop_ids, str(state.device))]


def publish_one(
    device: str,
    columns: dict[RowColumn, int],
    sampled: int,
    segment: list[int],
    error: int | None = None,
) -> tuple[list[int], list[int]]:
    """Publishes one segment of row 1; returns the record and the first columns of the row."""
    state = row_state(device, {1: {RowColumn.GENERATION: 6, RowColumn.REMAINING: 5, **columns}}, 3)
    record = poisoned(1, 6, dtype=torch.int32, device=device)
    errors = None if error is None else ints([error], device)
    ops.publish_(
        tables_of(state, [[0] * 3, [2, 40, 41], [0] * 3]),
        record,
        ints([sampled], device),
        ints([segment], device),
        errors,
    )
    return record[0].tolist(), state[1, :4].tolist()


def test_publish_advances_a_row(device: str) -> None:
    record, state = publish_one(
        device, {RowColumn.POSITION: 7, RowColumn.LAST_TOKEN: 3}, 12, [1, 0, 1, SAMPLE]
    )
    assert record == [1, 6, 1, 0, 12, -1]
    assert state == [12, 8, 4, 1]


def test_publish_of_a_partial_chunk_only_moves_the_position(device: str) -> None:
    record, state = publish_one(
        device, {RowColumn.POSITION: 7, RowColumn.LAST_TOKEN: 3}, -1, [1, 0, 16, STAGED]
    )
    assert record == [1, 6, 0, 0, -1, -1]
    assert state == [3, 23, 5, 1]


def test_publish_stops_at_a_stop_id_among_those_that_count(device: str) -> None:
    record, state = publish_one(device, {RowColumn.STOP_COUNT: 2}, 40, [1, 0, 1, SAMPLE])
    assert record == [1, 6, 1, RecordFlag.STOP, 40, -1]
    assert state == [40, 1, 4, 0]
    record, state = publish_one(device, {RowColumn.STOP_COUNT: 2}, 41, [1, 0, 1, SAMPLE])
    assert record == [1, 6, 1, 0, 41, -1]
    record, _ = publish_one(device, {RowColumn.STOP_COUNT: 99}, 41, [1, 0, 1, SAMPLE])
    assert record[3] == RecordFlag.STOP


def test_publish_stops_at_the_cap_and_a_stop_id_wins(device: str) -> None:
    record, state = publish_one(device, {RowColumn.REMAINING: 1}, 12, [1, 0, 1, SAMPLE])
    assert record == [1, 6, 1, RecordFlag.LENGTH, 12, -1]
    assert state == [12, 1, 0, 0]
    record, _ = publish_one(
        device, {RowColumn.REMAINING: 1, RowColumn.STOP_COUNT: 1}, 2, [1, 0, 1, SAMPLE]
    )
    assert record[3] == RecordFlag.STOP


@pytest.mark.parametrize(
    ("sampled", "error", "flag"),
    [
        (-1, None, RecordFlag.NO_CANDIDATE),
        (5, RecordFlag.MASK_ERROR, RecordFlag.MASK_ERROR),
        (-1, 0, RecordFlag.NO_CANDIDATE),
    ],
)
def test_publish_ends_a_row_in_error(
    device: str, sampled: int, error: int | None, flag: int
) -> None:
    record, state = publish_one(
        device, {RowColumn.LAST_TOKEN: 3}, sampled, [1, 0, 1, SAMPLE], error
    )
    assert record == [1, 6, 0, flag, -1, -1]
    assert state == [3, 1, 5, 0]


@pytest.mark.parametrize("row", [0, 1, 3, -1])
def test_publish_skips_zombies_and_padding(device: str, row: int) -> None:
    state = row_state(
        device, {0: {RowColumn.GENERATION: 9}, 1: {RowColumn.ALIVE: 0, RowColumn.GENERATION: 6}}, 3
    )
    before = state.clone()
    record = poisoned(1, 5, dtype=torch.int32, device=device)
    ops.publish_(
        tables_of(state, [[0]] * 3), record, ints([12], device), ints([[row, 0, 1, SAMPLE]], device)
    )
    assert record[0].tolist() == [row, {0: 9, 1: 6}.get(row, 0), 0, RecordFlag.DEAD, -1]
    assert_same_bits(state, before)


@pytest.mark.parametrize("seed", range(40))
def test_publish_equals_the_reference(device: str, seed: int) -> None:
    step = random_step(device, seed)
    generator = torch.Generator().manual_seed(seed)
    count = len(step.segments)
    sampled = torch.randint(-1, 50, (count,), generator=generator).int().to(device)
    errors = (
        torch.tensor([0, 0, 0, 8])[torch.randint(0, 4, (count,), generator=generator)]
        .int()
        .to(device)
    )
    tables, expected_tables = step.clone().tables, step.clone().tables
    record, expected = (poisoned(count, 7, dtype=torch.int32, device=device) for _ in range(2))
    ops.publish_(tables, record, sampled, step.segments, errors)
    reference.publish_(expected_tables, expected, sampled, step.segments, errors)
    assert_same_tensors([*tables, record], [*expected_tables, expected])


def test_a_row_lives_through_head_and_tail(device: str) -> None:
    """Three steps of one row, tokens 30, 31, 32, of which the third is a stop id."""
    state = row_state(
        device,
        {
            1: {
                RowColumn.LAST_TOKEN: 5,
                RowColumn.POSITION: 2,
                RowColumn.REMAINING: 9,
                RowColumn.STOP_COUNT: 1,
                RowColumn.CONSTRAINT: HOST_MASK,
            }
        },
        2,
    )
    step = empty_step(device, state, [[1, 0, 1, SAMPLE]], num_tokens=1)
    step.stop_ids[1, 0] = 32
    record = torch.zeros(1, 5, dtype=torch.int32, device=device)
    seen = []
    for token in (30, 31, 32, 33):
        ops.begin_step_(*step.arguments())
        seen.append(step.decode_meta[0].tolist())
        ops.publish_(step.tables, record, ints([token], device), step.segments)
    assert seen == [[5, 2, 3, 1], [30, 3, 4, 1], [31, 4, 5, 1], DEAD]
    assert record[0].tolist() == [1, 0, 0, RecordFlag.DEAD, -1]
