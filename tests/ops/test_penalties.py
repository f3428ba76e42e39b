"""Logit biases and penalties: what a row's own logits become, and what counts its tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import DELTA_ZEROS, ROW_COLUMNS, DeltaTable, RowColumn
from photon_ext.row_params import RowParams
from photon_ext.row_words import bias_words, prompt_bits, row_words
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, poisoned, randn
from tests.ops.tables import SAMPLE, STAGED, empty_step, float_bits, row_state

INF = float("inf")


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tables_of(
    device: str, rows: list[RowParams], vocab: int, prompt: list[int], answer: list[int]
) -> list[Tensor]:
    """The tables of rows with these parameters, all of one prompt and one answer."""
    biases = max(len(params.logit_bias) for params in rows)
    counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab).tolist()
    words = [
        [[0] * ROW_COLUMNS, *(row_words(params, 1) for params in rows)],
        [[]] * (len(rows) + 1),
        [[]] * (len(rows) + 1),
        [
            own + [7] * (2 * biases - len(own))
            for own in ([], *(bias_words(params) for params in rows))
        ],
        [counts] * (len(rows) + 1),
        [prompt_bits([*prompt, *answer], vocab)] * (len(rows) + 1),
    ]
    return [torch.tensor(table, dtype=torch.int32, device=device) for table in words]


def segments_of(rows: int, device: str) -> Tensor:
    return ints([[row, row - 1, 1, SAMPLE] for row in range(1, rows + 1)], device)


# --- the specification ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [2.0, -2.0, 1.0, 4.0]),
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 1.0, 2.0]),  # ids 0, 1 and 3 were there
        ({"presence_penalty": 0.5}, [2.0, -2.5, 1.0, 3.5]),  # in the answer alone: 1 and 3
        ({"frequency_penalty": 0.5}, [2.0, -3.0, 1.0, 3.5]),  # 1 came twice
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [2.0, -1.5, 1.0, 4.75]),
        ({"logit_bias": {2: 3.0, 0: -INF}}, [-INF, -2.0, 4.0, 4.0]),
        # the bias first, then the penalty of repetition, then the others
        (
            {"logit_bias": {1: 6.0}, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
            [1.0, 0.0, 1.0, 1.0],
        ),
    ],
)
def test_what_becomes_of_logits(params: dict[str, object], expected: list[float]) -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 4.0])
    rows = [RowParams(seed=0, **params)]  # type: ignore[arg-type]
    tables = tables_of("cpu", rows, 4, [0, 3], [1, 3, 1])
    assert reference.adjusted(logits, 1, tables).tolist() == expected
    assert logits.tolist() == [2.0, -2.0, 1.0, 4.0]


# --- the op ---------------------------------------------------------------------------------------


def mixed_rows(count: int, vocab: int, temperature: float) -> list[RowParams]:
    """Rows of which some have biases, some penalties, some both, some neither, and filters."""
    rng = random.Random(vocab)
    ids = range(vocab)
    return [
        RowParams(
            temperature=temperature,
            seed=seed,
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.3, -0.1]),
            logit_bias={
                rng.choice(ids): rng.choice([-INF, -3.1, 0.7, 5.0])
                for _ in range(rng.choice([0, 0, 1, 9]))
            },
        )
        for seed in range(count)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 9, 1000, 20_011])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_references(
    device: str, hopper: bool, dtype: torch.dtype, vocab: int, temperature: float
) -> None:
    rng = random.Random(vocab)
    rows = mixed_rows(12, vocab, temperature)
    prompt, answer = (
        [rng.randrange(vocab) for _ in range(min(vocab, size))] for size in (300, 500)
    )
    tables = tables_of(device, rows, vocab, prompt, answer)
    logits = in_wider_tokens(randn(len(rows), vocab, dtype=dtype, device=device))
    before, segments = logits.clone(), segments_of(len(rows), device)
    found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=tables)
    expected = reference.sample(logits, segments, tables[0], tables=tables)
    assert_same_bits(found, expected)
    assert_same_bits(logits, before)
    for own, token, alone in zip(rows, found, ops.sample(logits, segments, tables[0]), strict=True):
        if not (own.logit_bias or own.counts_tokens):
            assert token == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [20_011, 70_000])
def test_every_id_may_have_a_penalty(
    device: str, hopper: bool, vocab: int, temperature: float
) -> None:
    """More than a list of them holds, or than a thread has room for."""
    rows = mixed_rows(6, vocab, temperature)
    tables = tables_of(device, rows, vocab, list(range(vocab)), [5, 9, 9])
    logits = randn(len(rows), vocab, dtype=torch.bfloat16, device=device)
    segments = segments_of(len(rows), device)
    found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=tables)
    assert_same_bits(found, reference.sample(logits, segments, tables[0], tables=tables))


@pytest.mark.parametrize(
    "filter_", [(300, 1.0, 0.0), (0, 0.5, 0.0), (500, 0.9, 0.0), (0, 1.0, 0.9)]
)
def test_ids_with_a_penalty_are_found_where_more_are_kept_than_a_list_holds(
    device: str, hopper: bool, filter_: tuple[int, float, float]
) -> None:
    """All logits are alike but those of 700 ids, which are the likeliest by their penalty."""
    vocab, (top_k, top_p, min_p) = 20_003, filter_
    row = RowParams(
        temperature=0.2, seed=0, top_k=top_k, top_p=top_p, min_p=min_p, presence_penalty=-2.0
    )
    rows = [replace(row, seed=seed) for seed in range(8)]
    answer = list(range(0, 19_600, 28))
    tables = tables_of(device, rows, vocab, [], answer)
    logits = torch.zeros(len(rows), vocab, dtype=torch.bfloat16, device=device)
    segments = segments_of(len(rows), device)
    found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=tables)
    assert_same_bits(found, reference.sample(logits, segments, tables[0], tables=tables))
    assert set(found.tolist()) <= set(answer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("adjusted", "other"), [(9, 10), (10, 9), (8, 9), (8, 4100), (4100, 9)])
def test_of_equal_scores_the_lowest_id_is_taken_with_a_bias_or_without(
    device: str, hopper: bool, dtype: torch.dtype, adjusted: int, other: int
) -> None:
    logits = torch.zeros(1, 5000, dtype=dtype, device=device)
    logits[0, adjusted], logits[0, other] = 1.5, 2.0
    tables = tables_of(device, [RowParams(seed=0, logit_bias={adjusted: 0.5})], 5000, [], [])
    segments = segments_of(1, device)
    found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=tables)
    assert found.tolist() == [min(adjusted, other)]


def test_penalties_change_what_is_drawn_and_how_often(device: str, hopper: bool) -> None:
    draws, vocab = 4000, 6
    logits = torch.tensor([1.0, 0.5, -0.5, 1.5, 0.0, 2.0])
    params = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 1.0, 5: -INF},
    }
    rows = [RowParams(temperature=0.8, seed=seed, **params) for seed in range(draws)]  # type: ignore[arg-type]
    tables = tables_of(device, rows, vocab, [0, 2], [3, 3, 2])
    repeated, segments = logits.repeat(draws, 1).to(device), segments_of(draws, device)
    tokens = ops.sample(repeated, segments, tables[0], hopper=hopper, tables=tables)
    counted = torch.bincount(tokens.long().cpu(), minlength=vocab).double()
    wanted = torch.tensor([1 / 1.5, 0.5, -0.75 - 0.6, 1.0 - 0.8, 1.0, -INF]).double()
    expected = (wanted / 0.8).softmax(0) * draws
    assert counted[5] == 0
    # exceeded by chance once in 2,000 seeds
    assert ((counted - expected)[:5] ** 2 / expected[:5]).sum() < 20


def test_all_parameters_together_draw_by_the_exact_distribution(device: str, hopper: bool) -> None:
    """Bias, penalties, temperature, top_k, top_p of what is left, min_p, in this order: frequencies
    over 4,000 seeds (chi-square, 3 degrees).
    """
    draws, vocab, ids = 4000, 1000, [3, 40, 41, 500, 998, 999]
    logits = torch.full((vocab,), -4.0)
    logits[ids] = torch.tensor([2.0, 1.0, 1.6, 0.9, 1.8, 0.0])
    params = {
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.85,
        "min_p": 0.1,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
        "logit_bias": {999: 1.2, 500: -3.0},
    }
    rows = [RowParams(seed=seed, **params) for seed in range(draws)]  # type: ignore[arg-type]
    tables = tables_of(device, rows, vocab, [3], [41, 41])
    repeated, segments = logits.repeat(draws, 1).to(device), segments_of(draws, device)
    tokens = ops.sample(repeated, segments, tables[0], hopper=hopper, tables=tables)
    counted = torch.bincount(tokens.long().cpu(), minlength=vocab)[ids].double()
    # 500 is the sixth; 41 comes after what makes 85 percent
    scores = torch.tensor([2.0 / 1.25, 1.0, 1.6 / 1.25 - 0.3 - 0.2, -INF, 1.8, 1.2]).double()
    likely = (scores / 0.8).softmax(0)
    kept = likely >= 0.1 * likely.max()
    ordered = likely.sort(descending=True)
    kept &= likely >= ordered.values[int((ordered.values.cumsum(0) < 0.85).sum())]
    assert kept.tolist() == [True, True, False, False, True, True]
    expected = torch.where(kept, likely, 0) / likely[kept].sum() * draws
    assert counted.sum() == draws
    assert (counted[~kept] == 0).all()
    # exceeded by chance once in 5,000 seeds
    assert ((counted - expected)[kept] ** 2 / expected[kept]).sum() < 20


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 2**31 - 1])
def test_garbage_in_the_tables_is_no_fault(device: str, hopper: bool, count: int) -> None:
    tables = tables_of(device, [RowParams(seed=0, logit_bias={2: 9.0})], 4, [], [])
    tables[0][1, RowColumn.BIAS_COUNT] = count
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.5]], device=device)
    found = ops.sample(logits, segments_of(1, device), tables[0], hopper=hopper, tables=tables)
    assert found.tolist() == [2 if count >= 1 else 1]


def test_rows_without_such_tables_have_no_penalties(device: str, hopper: bool) -> None:
    params = RowParams(seed=0, repetition_penalty=5.0, logit_bias={1: -INF})
    tables = tables_of(device, [params], 3, [1], [1])
    logits, segments = torch.tensor([[0.0, 2.0, 1.0]], device=device), segments_of(1, device)
    for given, token in [(None, 1), (tables[:3], 1), (tables[:4], 2), (tables, 2)]:
        found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=given)
        assert found.tolist() == [token]


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_ids_without_bits_have_penalties_by_their_counts(
    device: str, hopper: bool, bits: int
) -> None:
    """Where there is no table of bits, or it ends before the vocabulary."""
    params = RowParams(seed=0, presence_penalty=2.0)
    tables = tables_of(device, [params], 100, [], [99])[:5]
    if bits:
        tables.append(torch.zeros(2, bits, dtype=torch.int32, device=device))
    logits, segments = torch.zeros(1, 100, device=device), segments_of(1, device)
    logits[0, [50, 99]] = torch.tensor([1.0, 2.0], device=device)
    found = ops.sample(logits, segments, tables[0], hopper=hopper, tables=tables)
    assert found.tolist() == [50]


def test_many_rows_are_sampled_as_few(device: str) -> None:
    """Where they are so many that fewer blocks share a row."""
    vocab, count = 70_000, 97
    rows = mixed_rows(6, vocab, 1.0)
    tables = tables_of(device, rows, vocab, list(range(0, vocab, 9)), [5, 9, 69_999])
    logits = 3 * randn(len(rows), vocab, dtype=torch.bfloat16, device=device)
    few = segments_of(len(rows), device)
    many = torch.cat([few, torch.zeros(count - len(rows), 4, dtype=torch.int32, device=device)])
    of_many = torch.cat([logits, logits.new_zeros(count - len(rows), vocab)])
    found = ops.sample(of_many, many, tables[0], hopper=True, tables=tables)
    assert_same_bits(found[: len(rows)], ops.sample(logits, few, tables[0], tables=tables))


def test_tables_of_other_rows_are_refused(device: str) -> None:
    tables = tables_of(device, [RowParams(seed=0)], 3, [], [])
    logits, segments = torch.zeros(1, 3, device=device), segments_of(1, device)
    with pytest.raises(RuntimeError, match=r"sample_into: tables\[0\] \(row_state\) has shape"):
        ops.sample(logits, segments, tables[0][:1], tables=tables)


# --- counting -------------------------------------------------------------------------------------

COUNTED = {RowColumn.FREQUENCY_PENALTY: float_bits(0.5), RowColumn.REMAINING: 9}


def test_staged_tokens_of_the_answer_are_counted(device: str) -> None:
    state = row_state(
        device,
        {
            1: {**COUNTED, RowColumn.POSITION: 3, RowColumn.ANSWER_BEGIN: 5},
            2: {RowColumn.REMAINING: 9},  # asks for no penalty
            3: {**COUNTED, RowColumn.LAST_TOKEN: 7, RowColumn.POSITION: 6},  # was counted before
        },
        4,
    )
    step = empty_step(
        device, state, [[1, 0, 5, STAGED], [2, 5, 2, STAGED], [3, 7, 1, SAMPLE]], num_tokens=8
    )
    step.staged_ids[:7] = ints([20, 21, 22, 22, 39, 22, 23], device)
    ops.begin_step_(*step.arguments())
    assert step.token_counts.nonzero().tolist() == [[1, 22], [1, 39]]
    assert step.token_counts[1, [22, 39]].tolist() == [2, 1]
    assert step.seen_bits.tolist() == [[0, 0], prompt_bits([22, 39], 64), [0, 0], [0, 0]]


def test_sampled_tokens_are_counted(device: str) -> None:
    rows = {row: dict(COUNTED) for row in (1, 2, 3)}
    state = row_state(device, {**rows, 4: {RowColumn.REMAINING: 9}}, 5)
    segments = [[1, 0, 1, SAMPLE], [2, 1, 1, SAMPLE], [3, 2, 1, 0], [4, 3, 1, SAMPLE]]
    step = empty_step(device, state, segments, num_tokens=4)
    record = poisoned(4, 5, dtype=torch.int32, device=device)
    for tokens in ([39, 40, 4, 5], [39, 2**31 - 1, 4, 5]):  # the table has 40 ids
        ops.publish_(step.tables, record, ints(tokens, device), step.segments)
    assert step.token_counts.nonzero().tolist() == [[1, 39]]
    assert step.token_counts[1, 39] == 2
    assert step.seen_bits.tolist() == [[0, 0], prompt_bits([39], 64), *[[0, 0]] * 3]


def test_counted_tokens_leave_the_bits_of_others(device: str) -> None:
    step = empty_step(device, row_state(device, {1: dict(COUNTED)}, 2), [[1, 0, 1, SAMPLE]], 1)
    step.seen_bits[1] = ints(prompt_bits([2, 31, 33], 64), device)
    record = poisoned(1, 5, dtype=torch.int32, device=device)
    for token in (31, 35):
        ops.publish_(step.tables, record, ints([token], device), step.segments)
    assert step.seen_bits[1].tolist() == prompt_bits([2, 31, 33, 35], 64)


def test_a_run_of_zeros_clears_counts(device: str) -> None:
    step = empty_step(device, row_state(device, {}, 2), [], num_tokens=0)
    step.token_counts.fill_(3)
    begin = int(DeltaTable.TOKEN_COUNTS), 45
    step.deltas = ints([1, 0, 0, 0, *begin, 30, DELTA_ZEROS, 8], device)
    ops.begin_step_(*step.arguments())
    flat = step.token_counts.flatten()
    assert flat[45:75].tolist() == [0] * 30
    assert flat.sum() == 3 * (flat.numel() - 30)
