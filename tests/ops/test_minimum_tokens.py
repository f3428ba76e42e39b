"""min_tokens: stop ids that a row may not sample yet."""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from photon_ext.layout import RecordFlag, RowColumn
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, randn
from tests.ops.tables import SAMPLE, float_bits, row_state

INF = float("inf")


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def rows_of(
    device: str, remaining: list[int], after: int, count: int = 2, **more: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_state and segments of rows with so many tokens left and `count` stop ids."""
    columns = {RowColumn[name]: word for name, word in more.items()}
    columns |= {RowColumn.STOP_AFTER: after, RowColumn.STOP_COUNT: count}
    rows = {
        row: {**columns, RowColumn.REMAINING: left, RowColumn.SEED_LOW: row}
        for row, left in enumerate(remaining, start=1)
    }
    segments = [[row, row - 1, 1, SAMPLE] for row in rows]
    return row_state(device, rows, len(rows) + 1), ints(segments, device)


def tables_of(state: torch.Tensor, stops: torch.Tensor) -> list[torch.Tensor]:
    """The tables of rows without pages."""
    return [state, state.new_empty(len(state), 0), stops]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [9, 20_011])
@pytest.mark.parametrize(
    "more", [{}, {"TEMPERATURE": float_bits(1.0)}, {"TEMPERATURE": float_bits(1.0), "TOP_K": 3}]
)
def test_stop_ids_are_suppressed_while_enough_tokens_remain(
    device: str, hopper: bool, dtype: torch.dtype, vocab: int, more: dict[str, int]
) -> None:
    state, segments = rows_of(device, [9, 8, 7, 1], after=8, **more)
    stops = ints([[2, vocab - 1]] * 5, device)
    logits = in_wider_tokens(randn(4, vocab, dtype=dtype, device=device))
    logits[:, 2], logits[:, vocab - 1] = 50.0, 90.0
    before, expected = logits.clone(), logits.clone()
    tables = tables_of(state, stops)
    found = ops.sample(logits, segments, state, hopper=hopper, tables=tables)
    tokens = reference.sample(expected, segments, state, tables=tables)
    assert_same_bits(found, tokens)
    assert_same_bits(logits, expected)
    assert not set(found[:2].tolist()) & {2, vocab - 1}
    assert found[2:].tolist() == [vocab - 1] * 2
    assert (logits[:2, [2, vocab - 1]] == -INF).all()
    assert_same_bits(logits[:, 3 : vocab - 1], before[:, 3 : vocab - 1])
    assert_same_bits(logits[2:], before[2:])


def test_without_a_bound_or_without_stop_ids_nothing_is_suppressed(
    device: str, hopper: bool
) -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]], device=device)
    stops = ints([[2, 3]] * 2, device)
    for after, given in [(0, stops), (-1, stops), (1, None)]:
        state, segments = rows_of(device, [9], after)
        tables = None if given is None else tables_of(state, given)
        assert ops.sample(logits, segments, state, hopper=hopper, tables=tables).tolist() == [2]
    assert logits.tolist() == [[0.0, 1.0, 5.0, 2.0]]


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 2**31 - 1])
def test_garbage_among_the_stop_ids_suppresses_nothing_else(
    device: str, hopper: bool, count: int
) -> None:
    state, segments = rows_of(device, [9], 1, count)
    stops = ints([[0] * 4, [2, -1, 2**31 - 1, 4]], device)
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]], device=device)
    found = ops.sample(logits, segments, state, hopper=hopper, tables=tables_of(state, stops))
    assert found.tolist() == [3 if count >= 1 else 2]


def test_a_row_whose_ids_are_all_suppressed_is_an_error(device: str, hopper: bool) -> None:
    state, segments = rows_of(device, [9, 9], 1)
    stops, errors = ints([[0, 1]] * 3, device), ints([0, 0], device)
    logits = torch.tensor([[1.0, 2.0, -INF], [1.0, 2.0, 0.0]], device=device)
    found = ops.sample(logits, segments, state, errors, hopper, tables_of(state, stops))
    assert found.tolist() == [-1, 2]
    assert errors.tolist() == [RecordFlag.NO_CANDIDATE, 0]


def test_rows_that_are_not_sampled_keep_their_logits(device: str, hopper: bool) -> None:
    state, segments = rows_of(device, [9, 9], 1)
    state[1, RowColumn.ALIVE] = 0
    segments[1, 3] = 0
    logits = torch.ones(2, 40, device=device)
    stops = ints([[0, 1]] * 3, device)
    ops.sample(logits, segments, state, hopper=hopper, tables=tables_of(state, stops))
    assert (logits == 1).all()
