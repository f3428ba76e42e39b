from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from photon_ext import RowParams, ops, reference
from photon_ext.layout import HOST_MASK, ROW_COLUMNS, RecordFlag, RowColumn
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, poisoned, randn
from tests.ops.tables import SAMPLE, float_bits, row_state

NAN, INF = float("nan"), float("inf")
KNOWN_ANSWERS = [  # Random123's kat_vectors: counter, key, result
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def greedy_rows(device: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """row_state and segments of `count` greedy rows."""
    state = row_state(device, {row: {} for row in range(1, count + 1)}, count + 1)
    segments = ints([[row, row - 1, 1, SAMPLE] for row in range(1, count + 1)], device).reshape(
        -1, 4
    )
    return state, segments


def warm_row(temperature: float, seed: int, position: int) -> dict[RowColumn, int]:
    return {
        RowColumn.TEMPERATURE: float_bits(temperature),
        RowColumn.SEED_LOW: seed,
        RowColumn.SEED_HIGH: ~seed,
        RowColumn.POSITION: position,
    }


def among_winners(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """A copy of x [rows, vocab] with elements before and after each row that would win if they
    were looked at.
    """
    buffer = torch.full((len(x), before + x.shape[1] + after), INF, dtype=x.dtype, device=x.device)
    view = buffer[:, before : before + x.shape[1]]
    view.copy_(x)
    return view


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_of_the_reference_gives_the_known_answers(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    assert reference.philox4x32(torch.tensor([counter]), *key).tolist() == [expected]


# --- sample_into ----------------------------------------------------------------------------------

Sample = Callable[..., torch.Tensor]


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def sample(hopper: bool) -> Sample:
    return partial(ops.sample, hopper=hopper)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 50257])
def test_greedy_takes_the_largest_logit(
    device: str, sample: Sample, dtype: torch.dtype, vocab: int
) -> None:
    state, segments = greedy_rows(device, 3)
    logits = in_wider_tokens(randn(3, vocab, dtype=dtype, device=device))
    out = poisoned(3, dtype=torch.int32, device=device)
    ops.sample_into(out, logits, segments, state)
    assert_same_bits(out, reference.sample(logits, segments, state))
    assert_same_bits(sample(logits, segments, state), out)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0, 5.0, 5.0, 5.0], 1),
        ([0.0, 0.0, 0.0, 0.0], 0),
        ([-0.0, 0.0, -1.0, 0.0], 0),
        ([NAN, 1.0, 2.0, NAN], 2),
        ([-INF, -5.0, -INF, -INF], 1),
        ([1.0, INF, INF, NAN], 1),
        ([NAN, NAN, NAN, NAN], -1),
        ([-INF, NAN, -INF, -INF], -1),
    ],
)
@pytest.mark.parametrize("repeat", [1, 1500])
def test_greedy_ties_and_odd_values(
    device: str, sample: Sample, logits: list[float], expected: int, repeat: int
) -> None:
    state, segments = greedy_rows(device, 1)
    row = torch.tensor([logits * repeat], device=device)
    errors = ints([0], device)
    assert sample(row, segments, state, errors).tolist() == [expected]
    assert errors.tolist() == [0 if expected >= 0 else RecordFlag.NO_CANDIDATE]


def test_segments_that_are_not_sampled_get_minus_one(device: str, sample: Sample) -> None:
    state, _ = greedy_rows(device, 4)
    state[2, RowColumn.ALIVE] = 0
    segments = ints(
        [
            [1, 0, 1, 0],
            [2, 1, 1, SAMPLE],
            [0, 2, 1, SAMPLE],
            [9, 3, 1, SAMPLE],
            [3, 4, 1, SAMPLE],
            [4, 5, 1, SAMPLE],
        ],
        device,
    )
    errors = ints([0, 0, 0, 0, int(RecordFlag.MASK_ERROR), 0], device)
    assert sample(torch.ones(6, 5, device=device), segments, state, errors).tolist() == [-1] * 5 + [
        0
    ]
    assert errors.tolist() == [0, 0, 0, 0, int(RecordFlag.MASK_ERROR), 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 257, 20000])
def test_temperature_equals_the_reference(
    device: str, sample: Sample, dtype: torch.dtype, vocab: int
) -> None:
    rows = {row: warm_row(0.4 * row, seed=1000 + row, position=3 * row) for row in range(1, 9)}
    state = row_state(device, rows, 9)
    segments = ints([[row, row, 1 + row % 3, SAMPLE] for row in range(1, 9)], device)
    logits = randn(8, vocab, dtype=dtype, device=device)
    assert_same_bits(sample(logits, segments, state), reference.sample(logits, segments, state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 5, 8, 12, 1001, 33003])
def test_rows_may_begin_and_end_anywhere(
    device: str, sample: Sample, dtype: torch.dtype, vocab: int
) -> None:
    state = row_state(
        device,
        {1: {}, 2: warm_row(0.7, seed=3, position=5), 3: {}, 4: warm_row(1.5, seed=4, position=6)},
        5,
    )
    segments = ints([[row, row, 1, SAMPLE] for row in range(1, 5)], device)
    logits = randn(4, vocab, dtype=dtype, device=device, seed=vocab)
    expected = reference.sample(logits, segments, state)
    for before, after in [(0, 0), (1, 0), (0, 1), (4, 4), (8, 8), (8, 5)]:
        assert_same_bits(sample(among_winners(logits, before, after), segments, state), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("after", [0, 5], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("top", [(3.0, 3.0), (-0.0, 0.0), (0.0, -0.0)])
def test_the_lower_of_equals_wins_wherever_they_are(
    device: str, sample: Sample, dtype: torch.dtype, after: int, top: tuple[float, float]
) -> None:
    """Two equal logits in a vector, in neighbouring threads, warps, blocks and loads, in the
    first and the last vector.
    """
    vocab = 170_003
    lower = [0, 6, 3, 7, 255, 4095, 2047, 16383, 32767, 81919, 163839, 0, 169999, 100_000]
    higher = [
        1,
        7,
        4,
        8,
        256,
        4096,
        2048,
        16384,
        32768,
        81920,
        163840,
        vocab - 1,
        vocab - 1,
        100_000 + 32768,
    ]
    state, segments = greedy_rows(device, len(lower))
    logits = torch.full((len(lower), vocab), -1.0, dtype=dtype, device=device)
    for row, ids in enumerate(zip(lower, higher, strict=True)):
        logits[row, list(ids)] = torch.tensor(top, dtype=dtype, device=device)
    assert sample(among_winners(logits, 0, after), segments, state).tolist() == lower


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nothing", [NAN, -INF])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_only_candidate_is_found(
    device: str, sample: Sample, dtype: torch.dtype, nothing: float, temperature: float
) -> None:
    """However low it is: the lowest of float32, divided by 0.5, is -inf. The last row has none."""
    vocab = 40_005
    ids = [0, 1, 7, 8, 4095, 4096, 32768, vocab - 6, vocab - 1]
    count = len(ids) + 1
    state = row_state(
        device,
        {row: warm_row(temperature, seed=row, position=0) for row in range(1, count + 1)},
        count + 1,
    )
    segments = ints([[row, row - 1, 1, SAMPLE] for row in range(1, count + 1)], device)
    logits = torch.full((count, vocab), nothing, dtype=dtype, device=device)
    logits[range(len(ids)), ids] = torch.finfo(dtype).min
    errors = ints([0] * count, device)
    assert sample(among_winners(logits, 8, 3), segments, state, errors).tolist() == [*ids, -1]
    assert errors.tolist() == [0] * len(ids) + [int(RecordFlag.NO_CANDIDATE)]


@pytest.mark.emulated_later
def test_temperature_draws_from_the_softmax(device: str) -> None:
    """Frequencies over 4,000 positions against exp(logit / t): the sum of squared errors in
    units of variance (chi-square, 4 degrees).
    """
    draws, temperature = 4000, 0.7
    logits = torch.tensor([0.5, -1.0, 1.0, 0.0, -0.3], device=device)
    state = row_state(
        device,
        {row: warm_row(temperature, seed=5, position=row) for row in range(1, draws + 1)},
        draws + 1,
    )
    segments = ints([[row, row, 1, SAMPLE] for row in range(1, draws + 1)], device)
    tokens = ops.sample(logits.expand(draws, -1).contiguous(), segments, state)
    expected = (logits / temperature).softmax(0).double() * draws
    counted = torch.bincount(tokens.long(), minlength=5).double()
    # exceeded by chance once in 2,000 seeds
    assert ((counted - expected) ** 2 / expected).sum() < 20


def test_rows_of_a_loop_without_a_pipeline_sample_as_their_parameters_say(device: str) -> None:
    params = [
        RowParams(temperature=0.7, seed=2**40 + 3, top_k=5),
        RowParams(),
        RowParams(temperature=0.7, seed=2**40 + 3, min_p=0.1),
    ]
    state = ops.row_state(params, [4, 0, 4], device)
    assert state.shape == (4, ROW_COLUMNS)
    assert not state[0].any()
    logits = randn(3, 40, dtype=torch.float32, device=device, seed=3)
    logits[2] = logits[0]
    segments = ints([[row, row - 1, 1, SAMPLE] for row in (1, 2, 3)], device)
    expected = poisoned(3, dtype=torch.int32, device=device)
    reference.sample_into(expected, logits.clone(), segments, state)
    tokens = ops.sample(logits, segments, state)
    assert tokens.tolist() == expected.tolist()
    assert tokens[1] == logits[1].argmax()
    with pytest.raises(ValueError, match="row_state: 2 positions for 3 rows; give one for each"):
        ops.row_state(params, [4, 0], device)


def test_noise_depends_on_seed_and_position_not_on_the_batch(device: str, sample: Sample) -> None:
    rows = {row: warm_row(1.0, seed=7, position=11) for row in (1, 2, 3)}
    rows[3][RowColumn.SEED_LOW] = 8
    state = row_state(device, rows, 4)
    logits = torch.zeros(3, 4096, device=device)
    segments = ints([[1, 0, 1, SAMPLE], [2, 1, 1, SAMPLE], [3, 2, 1, SAMPLE]], device)
    together = sample(logits, segments, state)
    assert together[0] == together[1]
    assert together[0] != together[2]
    assert sample(logits[2:], segments[2:], state).tolist() == together[2:].tolist()
    state[2, RowColumn.POSITION] = 12
    assert sample(logits, segments, state)[1] != together[1]
    moved = ints([[2, 0, 2, SAMPLE]], device)  # a chunk that ends at the same position
    state[2, RowColumn.POSITION] = 10
    assert sample(logits[:1], moved, state).tolist() == together[:1].tolist()


def test_temperature_never_takes_what_is_masked(device: str, sample: Sample) -> None:
    state = row_state(
        device, {row: warm_row(50.0, seed=row, position=0) for row in range(1, 65)}, 65
    )
    segments = ints([[row, row, 1, SAMPLE] for row in range(1, 65)], device)
    logits = torch.full((64, 300), -INF, device=device)
    logits[:, 17] = -3.0
    logits[:, 18] = NAN
    assert sample(logits, segments, state).tolist() == [17] * 64


def test_sampling_no_segments(device: str, sample: Sample) -> None:
    state, segments = greedy_rows(device, 0)
    assert sample(torch.ones(0, 5, device=device), segments, state).tolist() == []


# --- apply_token_mask_ ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
def test_masks_forbid_ids(device: str, dtype: torch.dtype, vocab: int) -> None:
    state, segments = greedy_rows(device, 3)
    state[:, RowColumn.POSITION] = 4
    generator = torch.Generator().manual_seed(vocab)
    mask = (
        torch.randint(-(2**31), 2**31, (3, (vocab + 31) // 32 + 1), generator=generator)
        .int()
        .to(device)
    )
    keys = ints([[1, 4, 0], [2, 4, 2], [3, 4, 1]], device)
    logits = in_wider_tokens(randn(3, vocab, dtype=dtype, device=device))
    expected = logits.clone()
    errors, expected_errors = (poisoned(3, dtype=torch.int32, device=device) for _ in range(2))
    ops.apply_token_mask_(logits, mask, keys, segments, state, errors)
    reference.apply_token_mask_(expected, mask, keys, segments, state, expected_errors)
    assert_same_bits(logits, expected)
    assert_same_bits(errors, expected_errors)
    assert errors.tolist() == [0, 0, 0]
    forbidden = sum((mask[0, i // 32].item() >> (i % 32) & 1) == 0 for i in range(vocab))
    assert (logits[0] == -INF).sum() == forbidden


@pytest.mark.parametrize(
    ("key", "constraint", "error", "masked"),
    [
        ([1, 6, 0], HOST_MASK, 0, True),
        ([1, 6, 0], 0, 0, True),
        ([0, 0, 0], 0, 0, False),
        ([0, 6, 0], HOST_MASK, RecordFlag.MASK_ERROR, False),  # missing: closed, never "all"
        ([1, 5, 0], HOST_MASK, RecordFlag.MASK_ERROR, False),  # stale
        ([2, 6, 0], HOST_MASK, RecordFlag.MASK_ERROR, False),  # another row's
        ([2, 6, 0], 0, RecordFlag.MASK_ERROR, False),
        ([1, 6, 1], HOST_MASK, RecordFlag.MASK_ERROR, False),  # there is one mask
        ([1, 6, -1], HOST_MASK, RecordFlag.MASK_ERROR, False),
        ([1, 6, 2**31 - 1], 0, RecordFlag.MASK_ERROR, False),
        ([1, 6, -(2**31)], 0, RecordFlag.MASK_ERROR, False),
    ],
)
def test_masks_are_for_one_row_and_position(
    device: str, key: list[int], constraint: int, error: int, masked: bool
) -> None:
    state = row_state(
        device, {1: {RowColumn.POSITION: 4, RowColumn.CONSTRAINT: constraint}, 2: {}}, 3
    )
    segments = ints([[1, 0, 3, SAMPLE]], device)  # positions 4, 5, 6
    logits = torch.ones(1, 40, device=device)
    errors = poisoned(1, dtype=torch.int32, device=device)
    ops.apply_token_mask_(
        logits, ints([[8, 0]], device), ints([key], device), segments, state, errors
    )
    assert errors.tolist() == [error]
    assert (logits == 1).sum() == (1 if masked else 40)
    expected = torch.ones(1, 40, device=device)
    reference.apply_token_mask_(
        expected, ints([[8, 0]], device), ints([key], device), segments, state, errors
    )
    assert errors.tolist() == [error]
    assert_same_bits(logits, expected)


def test_masks_are_packed_by_their_places(device: str) -> None:
    """Two of four segments have a mask; the others have no place among them."""
    state = row_state(device, {row: {RowColumn.POSITION: 2} for row in range(1, 5)}, 5)
    segments = ints([[row, row - 1, 1, SAMPLE] for row in range(1, 5)], device)
    keys = ints([[0, 0, 0], [2, 2, 1], [0, 0, 0], [4, 2, 0]], device)
    masks = ints([[0b01], [0b10]], device)
    logits, errors = torch.ones(4, 2, device=device), poisoned(4, dtype=torch.int32, device=device)
    ops.apply_token_mask_(logits, masks, keys, segments, state, errors)
    assert errors.tolist() == [0, 0, 0, 0]
    assert logits.tolist() == [[1, 1], [-INF, 1], [1, 1], [1, -INF]]


def test_without_masks_every_key_is_an_error(device: str) -> None:
    state, segments = greedy_rows(device, 2)
    logits, errors = torch.ones(2, 9, device=device), poisoned(2, dtype=torch.int32, device=device)
    masks = torch.zeros(0, 1, dtype=torch.int32, device=device)
    keys = ints([[1, 0, 0], [0, 0, 0]], device)
    ops.apply_token_mask_(logits, masks, keys, segments, state, errors)
    assert errors.tolist() == [RecordFlag.MASK_ERROR, 0]
    assert (logits == 1).all()


def test_segments_that_are_not_sampled_are_not_masked(device: str) -> None:
    state = row_state(device, {1: {RowColumn.CONSTRAINT: HOST_MASK}, 2: {RowColumn.ALIVE: 0}}, 3)
    segments = ints([[1, 0, 1, 0], [2, 1, 1, SAMPLE], [0, 2, 1, SAMPLE], [7, 3, 1, SAMPLE]], device)
    keys = ints([[1, 0, 0], [2, 0, 1], [5, 0, 2], [7, 0, 3]], device)
    logits = torch.ones(4, 9, device=device)
    errors = poisoned(4, dtype=torch.int32, device=device)
    ops.apply_token_mask_(
        logits, torch.zeros(4, 1, dtype=torch.int32, device=device), keys, segments, state, errors
    )
    assert errors.tolist() == [0, 0, 0, 0]
    assert (logits == 1).all()


def test_a_mask_that_allows_nothing_ends_as_no_candidate(device: str) -> None:
    state = row_state(device, {1: {RowColumn.CONSTRAINT: HOST_MASK}}, 2)
    segments = ints([[1, 0, 1, SAMPLE]], device)
    logits, errors = torch.ones(1, 64, device=device), ints([0], device)
    ops.apply_token_mask_(
        logits, ints([[0, 0]], device), ints([[1, 0, 0]], device), segments, state, errors
    )
    assert ops.sample(logits, segments, state, errors).tolist() == [-1]
    assert errors.tolist() == [RecordFlag.NO_CANDIDATE]
