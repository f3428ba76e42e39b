"""top_k, top_p and min_p: which ids may be drawn, and how often each of them is."""

from __future__ import annotations

import math
import random

import pytest
import torch

from photon_ext import ops, reference
from photon_ext.layout import RecordFlag, RowColumn
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, randn
from tests.ops.tables import SAMPLE, float_bits, row_state

NAN, INF = float("nan"), float("inf")
Filter = tuple[int, float, float]
OFF: Filter = (0, 1.0, 0.0)


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def columns(filter_: Filter, temperature: float, seed: int) -> dict[RowColumn, int]:
    top_k, top_p, min_p = filter_
    return {
        RowColumn.TEMPERATURE: float_bits(temperature),
        RowColumn.SEED_LOW: seed,
        RowColumn.TOP_K: top_k,
        RowColumn.TOP_P: float_bits(top_p),
        RowColumn.MIN_P: float_bits(min_p),
    }


def rows_of(
    device: str, filters: list[Filter], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_state and segments of a row for each filter, with a seed of its own."""
    rows = {
        row: columns(filter_, temperature, seed=row) for row, filter_ in enumerate(filters, start=1)
    }
    segments = [[row, row - 1, 1, SAMPLE] for row in rows]
    return row_state(device, rows, len(rows) + 1), ints(segments, device)


def drawn(
    logits: torch.Tensor, filter_: Filter, hopper: bool, draws: int, temperature: float = 1.0
) -> torch.Tensor:
    """How often each id of one row is drawn, by so many seeds."""
    state, segments = rows_of(str(logits.device), [filter_] * draws, temperature)
    rows = logits.expand(draws, -1).contiguous()
    tokens = ops.sample(rows, segments, state, hopper=hopper)
    return torch.bincount(tokens.long(), minlength=len(logits)).cpu()


def kept(logits: list[float], filter_: Filter, temperature: float = 1.0) -> list[int]:
    """The ids that the specification keeps."""
    scaled = torch.tensor(logits) / temperature
    return reference.kept_ids(scaled, *filter_).nonzero().flatten().tolist()


# --- the specification ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "filter_", "expected"),
    [
        ([1.0, 3.0, 2.0, 0.0], (2, 1.0, 0.0), [1, 2]),
        ([1.0, 3.0, 2.0, 2.0], (2, 1.0, 0.0), [1, 2, 3]),  # ties at the k-th
        ([5.0, 5.0, 5.0], (1, 1.0, 0.0), [0, 1, 2]),
        ([1.0, 3.0], (2, 1.0, 0.0), [0, 1]),
        ([1.0, 3.0], (10**6, 1.0, 0.0), [0, 1]),  # more than there are
        ([0.0] * 4, (0, 0.5, 0.0), [0, 1, 2, 3]),  # ties at the threshold
        ([4.0, 0.0, 0.0], (0, 0.5, 0.0), [0]),  # one has more than is asked for
        ([4.0, 0.0, 0.0], (0, 1e-6, 0.0), [0]),
        ([2.0, 1.0, 0.0], (0, 0.8, 0.0), [0, 1]),  # 0.665, 0.245, 0.090
        ([2.0, 1.0, 0.0], (2, 0.7, 0.0), [0]),  # of what top_k leaves 0.731
        ([2.0, 1.0, 0.0], (0, 0.7, 0.0), [0, 1]),
        ([2.0, 1.0, 0.0], (0, 1.0, 0.3), [0, 1]),  # 1, 0.368, 0.135
        ([2.0, 1.0, 1.0], (0, 1.0, 1.0), [0]),
        ([2.0, 2.0, 1.0], (0, 1.0, 1.0), [0, 1]),
        ([2.0, 1.0, 0.0], (2, 0.9, 0.3), [0, 1]),
        ([-INF, 1.0, -INF], (2, 0.5, 0.5), [1]),
    ],
)
def test_the_specification_by_hand(
    logits: list[float], filter_: Filter, expected: list[int]
) -> None:
    assert kept(logits, filter_) == expected


def test_temperature_comes_before_the_filter() -> None:
    assert kept([2.0, 1.0, 0.0], (0, 0.8, 0.0), temperature=0.5) == [0]
    assert kept([2.0, 1.0, 0.0], (0, 0.8, 0.0), temperature=5.0) == [0, 1, 2]
    assert kept([2.0, 1.0, 0.0], (0, 1.0, 0.3), temperature=0.5) == [0]


@pytest.mark.parametrize("vocab", [5, 1000, 40_003])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_the_mass_that_is_kept_is_what_was_asked_for(vocab: int, top_p: float) -> None:
    """Against softmax in float64: enough is kept, and without the least likely it is too little."""
    logits = randn(vocab, dtype=torch.float32, device="cpu", seed=vocab) * 3
    kept_ids = reference.kept_ids(logits, 0, top_p, 0.0)
    masses = logits.double().softmax(0)[kept_ids]
    assert masses.sum() > top_p - 1e-5
    assert masses.sum() - masses.min() < top_p + 1e-5


def test_weights_fall_and_are_near_the_exact_ones() -> None:
    scaled = torch.cat([torch.linspace(0, -23, 300_000), -torch.logspace(-8, -2, 3000)])
    distance, weight = reference.token_weights(scaled)
    order = distance.argsort()
    assert (weight[order].diff() <= 0).all()
    exact = scaled.double().exp() * 2**31
    assert ((weight - exact).abs() <= 1 + 4e-6 * exact).all()
    assert weight.max() == 2**31


# --- the op ---------------------------------------------------------------------------------------


def random_filter(rng: random.Random) -> Filter:
    return (
        rng.choice([0, 0, 1, 2, 5, 50, 2**31 - 1]),
        rng.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
        rng.choice([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 3, 9, 257, 4099])
@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_the_token_is_the_references(
    device: str, hopper: bool, dtype: torch.dtype, vocab: int, spread: float
) -> None:
    rng = random.Random(vocab)
    filters = [random_filter(rng) for _ in range(12)]
    logits = in_wider_tokens(randn(12, vocab, dtype=dtype, device=device, seed=vocab) * spread)
    for temperature in (0.3, 1.0, 20.0):
        state, segments = rows_of(device, filters, temperature)
        found = ops.sample(logits, segments, state, hopper=hopper)
        assert_same_bits(found, reference.sample(logits, segments, state))


@pytest.mark.parametrize(
    "logits",
    [
        [NAN, 1.0, 0.9, NAN, 0.0, -1.0],
        [-INF, -INF, -7.0, -INF],  # masked but for one
        [-INF, 2.0, -INF, 2.0, 1.0, -INF],
        [INF, 1.0, INF],
        [3.0, 3.0, 3.0, 3.0, 3.0],
        [6.0, 0.0, 0.5, 0.2, 0.1],  # one has more than 40 %
        [3e38, -3e38, 0.0],
        [-3.4e38, NAN],
    ],
)
@pytest.mark.parametrize("filter_", [(1, 1.0, 0.0), (3, 0.8, 0.0), (0, 0.5, 0.2), (0, 1.0, 1.0)])
@pytest.mark.parametrize("repeat", [1, 90])
def test_odd_logits_draw_only_what_the_specification_keeps(
    device: str, hopper: bool, logits: list[float], filter_: Filter, repeat: int
) -> None:
    row = torch.tensor(logits * repeat, device=device)
    state, segments = rows_of(device, [filter_] * 12, 0.9)
    rows = row.expand(12, -1).contiguous()
    found = ops.sample(rows, segments, state, hopper=hopper)
    assert_same_bits(found, reference.sample(rows, segments, state))
    candidate = row > -INF
    allowed = torch.zeros_like(candidate)
    allowed[candidate] = reference.kept_ids(row[candidate] / 0.9, *filter_)
    assert allowed[found.long()].all()


@pytest.mark.parametrize("nothing", [NAN, -INF])
def test_a_row_without_candidates_is_an_error(device: str, hopper: bool, nothing: float) -> None:
    state, segments = rows_of(device, [(3, 0.9, 0.1)], 1.0)
    errors = ints([0], device)
    logits = torch.full((1, 300), nothing, device=device)
    assert ops.sample(logits, segments, state, errors, hopper).tolist() == [-1]
    assert errors.tolist() == [RecordFlag.NO_CANDIDATE]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_id_that_is_kept_is_drawn_and_no_other(
    device: str, hopper: bool, dtype: torch.dtype
) -> None:
    """Ties at the k-th, far apart in a vocabulary that is no multiple of anything."""
    logits = torch.full((9003,), -5.0, dtype=dtype, device=device)
    top = [0, 7, 2047, 4096, 9002]
    logits[top] = 3.0
    logits[100] = 3.5
    counts = drawn(logits, (3, 1.0, 0.0), hopper, draws=60)
    assert set(counts.nonzero().flatten().tolist()) == {100, *top}


@pytest.mark.parametrize(
    "logits", [[0.0] * 20_003, [float(-i % 7) / 100 for i in range(20_003)]], ids=["flat", "steps"]
)
def test_more_ids_are_kept_than_a_list_holds(
    device: str, hopper: bool, logits: list[float]
) -> None:
    rows = torch.tensor([logits] * 3, device=device)
    state, segments = rows_of(device, [(19_000, 1.0, 0.0), (0, 0.99, 0.0), (18_000, 0.5, 0.0)], 1.0)
    found = ops.sample(rows, segments, state, hopper=hopper)
    assert_same_bits(found, reference.sample(rows, segments, state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("vocab", [700, 40_003])
def test_the_likeliest_stand_apart_or_together(
    device: str, hopper: bool, dtype: torch.dtype, together: bool, vocab: int
) -> None:
    """A list of candidates that is short, one that a CTA's share alone overflows, and more than a
    list has room for."""
    likely = list(range(600)) if together else list(range(0, vocab, vocab // 600))
    logits = randn(8, vocab, dtype=dtype, device=device, seed=3)
    logits[:, likely] += 9
    filters = [
        (1, 1.0, 0.0),
        (64, 0.9, 0.02),
        (100, 0.5, 0.0),
        (101, 0.9, 0.0),
        (0, 0.2, 0.0),
        (0, 0.95, 0.001),
        (100, 1.0, 0.3),
        (300, 0.99, 0.0),
    ]
    state, segments = rows_of(device, filters, 0.8)
    found = ops.sample(logits, segments, state, hopper=hopper)
    assert_same_bits(found, reference.sample(logits, segments, state))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9])
def test_one_id_has_more_than_is_asked_for_of_the_whole_row(
    device: str, hopper: bool, top_p: float
) -> None:
    """A share of all ids, not of the candidates: the first has 0.476 of a flat row."""
    logits = torch.zeros(1, 20_001, device=device)
    logits[0, 12_345] = math.log(18_182)
    state, segments = rows_of(device, [(0, top_p, 0.0)] * 40, 1.0)
    rows = logits.expand(40, -1).contiguous()
    found = ops.sample(rows, segments, state, hopper=hopper)
    assert_same_bits(found, reference.sample(rows, segments, state))
    assert (found == 12_345).all() == (top_p < 0.476)


@pytest.mark.parametrize(
    "words",
    [
        {RowColumn.TOP_K: -3},
        {RowColumn.TOP_P: 0},
        {RowColumn.TOP_P: float_bits(1.0)},
        {RowColumn.TOP_P: float_bits(-0.5)},
        {RowColumn.TOP_P: float_bits(NAN)},
        {RowColumn.MIN_P: float_bits(NAN)},
        {RowColumn.MIN_P: float_bits(1.5)},
        {RowColumn.TOP_K: 500, RowColumn.TOP_P: float_bits(1.0)},
    ],
)
def test_a_filter_that_is_none_changes_no_token(
    device: str, hopper: bool, words: dict[RowColumn, int]
) -> None:
    state, segments = rows_of(device, [OFF] * 30, 1.0)
    logits = randn(30, 500, dtype=torch.float32, device=device)
    plain = ops.sample(logits, segments, state, hopper=hopper)
    for column, word in words.items():
        state[:, column] = word
    assert_same_bits(ops.sample(logits, segments, state, hopper=hopper), plain)


def test_a_filter_changes_no_greedy_token(device: str, hopper: bool) -> None:
    state, segments = rows_of(device, [(5, 0.5, 0.5)] * 3, 0.0)
    logits = randn(3, 500, dtype=torch.float32, device=device)
    assert ops.sample(logits, segments, state, hopper=hopper).tolist() == logits.argmax(1).tolist()


def test_rows_beside_a_filtered_one_keep_their_tokens(device: str, hopper: bool) -> None:
    state, segments = rows_of(device, [OFF, (2, 0.9, 0.1), OFF], 1.0)
    logits = randn(3, 5000, dtype=torch.bfloat16, device=device)
    together = ops.sample(logits, segments, state, hopper=hopper)
    for row in range(3):
        one = slice(row, row + 1)
        assert ops.sample(logits[one], segments[one], state, hopper=hopper) == together[row]


@pytest.mark.parametrize(
    "filter_",
    [(4, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (5, 0.95, 0.1)],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_frequencies_are_those_of_what_is_kept(device: str, filter_: Filter) -> None:
    """Frequencies over 4,000 seeds against the softmax of the kept ids, as sets by float64: the
    sum of squared errors in units of variance (chi-square, at most 4 degrees).
    """
    draws, temperature = 4000, 0.7
    logits = torch.tensor([0.5, -1.0, 1.0, 0.0, -0.3, 0.9, -2.0])
    probability = (logits.double() / temperature).softmax(0)
    order = probability.argsort(descending=True)
    top_k, top_p, min_p = filter_
    kept_ids = order[: top_k or None]
    mass = (probability[kept_ids] / probability[kept_ids].sum()).cumsum(0)
    kept_ids = kept_ids[: int((mass < top_p).sum()) + 1]
    kept_ids = kept_ids[probability[kept_ids] >= min_p * probability.max()]
    assert 2 <= len(kept_ids) <= 5
    counted = drawn(logits.to(device), filter_, False, draws, temperature).double()
    expected = probability[kept_ids] / probability[kept_ids].sum() * draws
    assert counted[kept_ids].sum() == draws
    # exceeded by chance once in 2,000 seeds
    assert ((counted[kept_ids] - expected) ** 2 / expected).sum() < 20
