"""Log-probabilities of sampled tokens and of the likeliest ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import LOGPROB_WIDTH, MOST_LOGPROBS, RowColumn
from photon_ext.row_params import RowParams
from photon_ext.row_words import row_words
from tests.ops.numeric import DTYPES, in_wider_tokens, ints, poisoned, randn
from tests.ops.tables import SAMPLE
from tests.ops.test_penalties import segments_of, tables_of

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def rows_of(device: str, asked: list[int | None], **params: object) -> tuple[Tensor, Tensor]:
    """row_state and segments of rows that ask for so many."""
    rows = [
        row_words(RowParams(seed=row, logprobs=count, **params), 1)  # type: ignore[arg-type]
        for row, count in enumerate(asked)
    ]
    state = ints([[0] * len(rows[0]), *rows], device)
    return state, ints([[row, row - 1, 1, SAMPLE] for row in range(1, len(rows) + 1)], device)


def floats(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.float32)


def assert_same(found: Tensor, expected: Tensor, asked: list[int | None]) -> None:
    """Ids equal, values near, and nothing written but what was asked for."""
    for own, wanted, count in zip(found.cpu(), expected.cpu(), asked, strict=True):
        end = 0 if count is None else 1 + 2 * count
        assert torch.equal(own[end:], wanted[end:])
        assert torch.equal(own[1:end:2], wanted[1:end:2])
        torch.testing.assert_close(floats(own[0:end:2]), floats(wanted[0:end:2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 9, 1000, 20_011])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_they_are_the_references(
    device: str, hopper: bool, dtype: torch.dtype, vocab: int, temperature: float
) -> None:
    asked = [0, None, 1, 5, MOST_LOGPROBS]
    state, segments = rows_of(device, asked, temperature=temperature, top_k=3)
    logits = in_wider_tokens(4 * randn(len(asked), vocab, dtype=dtype, device=device))
    found = poisoned(len(asked), LOGPROB_WIDTH, dtype=torch.int32, device=device)
    expected = found.clone()
    tokens = ops.sample(logits, segments, state, hopper=hopper, logprobs=found)
    assert tokens.equal(reference.sample(logits, segments, state, logprobs=expected))
    assert tokens.equal(ops.sample(logits, segments, state, hopper=hopper))
    assert_same(found, expected, asked)


@pytest.mark.parametrize("alike", [15, 300, 20_000])
def test_the_likeliest_are_many_or_few(device: str, hopper: bool, alike: int) -> None:
    """More ids at the threshold than a short list holds, or than its part of one CTA does."""
    state, segments = rows_of(device, [MOST_LOGPROBS])
    logits = randn(1, 20_000, dtype=torch.bfloat16, device=device)
    logits[:, 7 : 7 + alike] = 9.0
    found = poisoned(1, LOGPROB_WIDTH, dtype=torch.int32, device=device)
    expected = found.clone()
    ops.sample(logits, segments, state, hopper=hopper, logprobs=found)
    reference.sample(logits, segments, state, logprobs=expected)
    assert_same(found, expected, [MOST_LOGPROBS])


@pytest.mark.parametrize(
    ("logits", "top"),
    [
        ([0.0] * 30, list(range(20))),  # ties go to the lower ids
        ([1.0, NAN, 3.0, -INF, 2.0], [2, 4, 0] + [-1] * 17),
        ([-INF, 100.0, -INF], [1] + [-1] * 19),
        ([5.0, -300.0], [0, 1] + [-1] * 18),  # far below, and there all the same
    ],
)
def test_ties_and_what_is_no_candidate(
    device: str, hopper: bool, logits: list[float], top: list[int]
) -> None:
    state, segments = rows_of(device, [MOST_LOGPROBS])
    given = torch.tensor([logits], device=device)
    found = poisoned(1, LOGPROB_WIDTH, dtype=torch.int32, device=device)
    expected = found.clone()
    ops.sample(given, segments, state, hopper=hopper, logprobs=found)
    reference.sample(given, segments, state, logprobs=expected)
    assert found[0, 1::2].tolist() == top
    assert_same(found, expected, [MOST_LOGPROBS])


def test_they_are_of_the_logits_as_given(device: str, hopper: bool) -> None:
    """Stop ids that may not be sampled, biases and penalties change the token alone."""
    state, segments = rows_of(
        device, [3], min_tokens=1, stop_token_ids=(2,), logit_bias={0: 9.0}, temperature=0.0
    )
    none = state.new_zeros(2, 0)
    bias = ints([[0, 0], [0, 0x41100000]], device)  # 9.0
    tables = [state, none, ints([[2], [2]], device), bias]
    logits = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    expected = logits[0].log_softmax(0)
    found = poisoned(1, LOGPROB_WIDTH, dtype=torch.int32, device=device)
    token = ops.sample(logits, segments, state, hopper=hopper, tables=tables, logprobs=found)
    assert token.tolist() == [0]
    assert found[0, 1:7:2].tolist() == [2, 1, 0]
    wanted = expected[[0, 2, 1, 0]]
    torch.testing.assert_close(floats(found[0, 0:7:2]), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [9, 1000, 20_011])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_processed_ones_are_of_what_is_sampled(
    device: str, hopper: bool, dtype: torch.dtype, vocab: int, temperature: float
) -> None:
    """Beside raw ones; with and without what changes logits, and with stop ids left out."""
    asked: list[int | None] = [5, 5, 0, 3, None]
    rows = [
        RowParams(
            temperature=temperature,
            seed=3,
            top_k=2,
            logprobs=count,
            logprobs_mode="raw" if index == 1 else "processed",
            logit_bias={1: 4.0, 2: -INF} if index < 2 else {},
            repetition_penalty=1.4 if index < 3 else 1.0,
            min_tokens=1,
            stop_token_ids=(0,),
        )
        for index, count in enumerate(asked)
    ]
    tables = tables_of(device, rows, vocab, [1, 3], [3, 3, 5])
    tables[2] = ints([[0]] * len(tables[0]), device)
    logits = in_wider_tokens(4 * randn(len(rows), vocab, dtype=dtype, device=device))
    found = poisoned(len(rows), LOGPROB_WIDTH, dtype=torch.int32, device=device)
    expected, segments = found.clone(), segments_of(len(rows), device)
    tokens = ops.sample(
        logits.clone(), segments, tables[0], hopper=hopper, tables=tables, logprobs=found
    )
    state = tables[0]
    assert tokens.equal(reference.sample(logits, segments, state, tables=tables, logprobs=expected))
    assert_same(found, expected, asked)
    assert not floats(found[0, :1]).equal(floats(found[1, :1]))


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("asked", [2**31 - 1, 6, 0, -6, -(2**31)])
def test_no_more_than_there_is_room_for(device: str, hopper: bool, width: int, asked: int) -> None:
    state, segments = rows_of(device, [0])
    state[1, RowColumn.LOGPROBS] = asked
    found = poisoned(2, width, dtype=torch.int32, device=device)
    before = found.clone()
    logits = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    ops.sample(logits, segments, state, hopper=hopper, logprobs=found[:1])
    assert found[1].equal(before[1])
    if asked == 0:
        assert found.equal(before)
    else:
        assert found[0, 1::2].tolist() == [2, 1][: width // 2]


def test_they_have_the_same_bits_among_many_rows(device: str) -> None:
    """Where rows are so many that fewer blocks share one."""
    asked: list[int | None] = [0, 3, MOST_LOGPROBS]
    state, segments = rows_of(device, asked)
    logits = 4 * randn(len(asked), 70_000, dtype=torch.bfloat16, device=device)
    few, many = (
        torch.zeros(rows, LOGPROB_WIDTH, dtype=torch.int32, device=device)
        for rows in (len(asked), 97)
    )
    ops.sample(logits, segments, state, hopper=True, logprobs=few)
    dead = 97 - len(asked)
    others = torch.zeros(dead, 4, dtype=torch.int32, device=device)
    of_many = torch.cat([logits, logits.new_zeros(dead, logits.shape[1])])
    ops.sample(of_many, torch.cat([segments, others]), state, hopper=True, logprobs=many)
    assert many[: len(asked)].equal(few)
