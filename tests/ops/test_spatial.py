"""spatial_features and choose_value: near the float64 reference, and equal to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import RowColumn, SegmentFlag
from tests.ops.caches import tokens_and_segments
from tests.ops.numeric import DTYPES, assert_close, assert_same_bits, ints, poisoned, randn
from tests.ops.tables import empty_step, row_state

SAMPLE, STAGED = int(SegmentFlag.SAMPLE), int(SegmentFlag.STAGED)
VOCAB, BINS = 40, 37
STOP = 11
LAST = VOCAB + BINS + BINS**2 - 1
# text, the first and last of coordinates and sizes, what is behind them, embeddings, and none
TOKENS = (0, VOCAB - 1, VOCAB, VOCAB + 5, VOCAB + BINS - 1, VOCAB + BINS, 500, LAST)
TOKENS += (LAST + 1, 2**31 - 1, -2, -(2**31))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("coordinates", "sizes", "padding"), [(1, 1, 0), (4, 3, 6), (128, 256, 2)])
def test_features_are_near_the_reference(
    device: str, dtype: torch.dtype, coordinates: int, sizes: int, padding: int
) -> None:
    meta, _ = tokens_and_segments([(row, 3, 1) for row in range(1, len(TOKENS) + 1)], device, 2)
    meta[: len(TOKENS), 0] = ints(TOKENS, device)
    meta[len(TOKENS), 0] = VOCAB  # dead
    coordinate, size = (
        randn(*shape, dtype=torch.float32, device=device, seed=shape[-1])
        for shape in ((coordinates,), (2, sizes))
    )
    width = 2 * (coordinates + sizes + 1) + padding
    out = poisoned(len(meta), width, dtype=dtype, device=device)
    ops.spatial_features_into(out, meta, coordinate, size, VOCAB, BINS)
    exact = torch.zeros(len(meta), width, dtype=torch.float64, device=device)
    reference.spatial_features_into(exact, meta, coordinate, size, VOCAB, BINS)
    assert_close(out, exact, slack=4.0)
    ones = exact[:, width - padding - 2 : width - padding].sum(dim=1).cpu()
    assert ones.tolist() == [VOCAB <= token <= LAST for token in TOKENS] + [0, 0]
    assert not out[ones == 0].any()


def rows_of(device: str) -> tuple[Tensor, list[Tensor], Tensor]:
    """Segments, tables and what was sampled: rows of each kind of object at each place, in decode
    steps and at the end of a chunk, with and without a stop id; and rows that have none.
    """
    state: dict[int, dict[RowColumn, int]] = {}
    segments: list[list[int]] = []
    sampled: list[int] = []
    for values in (-1, 0, 1, 2, 3, 4):
        for made in (-2, 0, 1, 2, 3, 4):
            for token, count, flags in (
                (STOP, 1, SAMPLE),
                (STOP + 1, 1, SAMPLE),
                (STOP, 3, SAMPLE | STAGED),
                (-1, 1, SAMPLE),
                (STOP, 1, STAGED),
            ):
                row = len(state) + 1
                state[row] = {
                    RowColumn.OBJECT_VALUES: values,
                    RowColumn.ANSWER_BEGIN: 20,
                    RowColumn.POSITION: 20 + made - count,
                    RowColumn.STOP_COUNT: 1,
                }
                segments.append([row, len(segments), count, flags])
                sampled.append(token)
    state[4][RowColumn.ALIVE] = 0
    segments += [[0, 0, 1, SAMPLE], [len(state) + 1, 0, 1, SAMPLE], [-1, 0, 1, SAMPLE]]
    sampled += [3, 3, 3]
    step = empty_step(device, row_state(device, state, len(state) + 1), segments, 1)
    step.stop_ids[:, 0] = STOP
    return step.segments, step.tables, ints(sampled, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bins", [2, 33, 1024])
def test_values_are_those_of_the_reference(device: str, dtype: torch.dtype, bins: int) -> None:
    segments, tables, sampled = rows_of(device)
    logits = randn(len(sampled), 3 * bins, dtype=dtype, device=device, seed=bins)
    expected = sampled.clone()
    reference.choose_value_(expected, logits, segments, tables, VOCAB)
    ops.choose_value_(sampled, logits, segments, tables, VOCAB)
    assert_same_bits(sampled, expected)
    assert (expected >= VOCAB + bins).any()
    assert (expected == STOP).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_bin_and_nan_is_none(device: str, dtype: torch.dtype) -> None:
    nan, low = float("nan"), float("-inf")
    segments = ints([[row, row - 1, 1, SAMPLE] for row in range(1, 6)], device)
    places = [0, 0, 1, 2, 2]
    state = {
        row: {RowColumn.OBJECT_VALUES: 3, RowColumn.POSITION: place + 8, RowColumn.ANSWER_BEGIN: 9}
        for row, place in enumerate(places, 1)
    }
    tables = empty_step(device, row_state(device, state, 6), [], 1).tables
    logits = torch.tensor(
        [
            [nan, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0],
            [nan, nan, low, nan, 1, 1, 1, 1, 1, 1, 1, 1],
            [low, low, low, -3, 1, 1, 1, 1, 1, 1, 1, 1],
            [5, 5, 5, 5, 0, 0, 1, 1, nan, 4, 4, 4],
            [5, 5, 5, 5, 0, 0, 1, 1, nan, nan, low, nan],
        ]
    ).to(dtype=dtype, device=device)
    sampled = ints([7] * 5, device)
    ops.choose_value_(sampled, logits, segments, tables, VOCAB)
    assert sampled.tolist() == [VOCAB + 2, -1, VOCAB + 3, VOCAB + 4 + 2 * 4 + 1, -1]
