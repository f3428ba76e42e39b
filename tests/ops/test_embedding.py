from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, poisoned, randn

VOCAB = 11


def tokens_of(tokens: list[int], device: str) -> torch.Tensor:
    """One live token per token."""
    return ints([[token, i, i + 1, 1] for i, token in enumerate(tokens)], device).reshape(-1, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_embedding_copies_rows(
    device: str, dtype: torch.dtype, hidden: int, num_tokens: int
) -> None:
    weight = randn(VOCAB, hidden, dtype=dtype, device=device)
    meta = tokens_of([i * 7 % VOCAB for i in range(num_tokens)], device)
    out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
    ops.embedding_into(out, meta, weight)
    assert_same_bits(out, weight[meta[:, 0].long()])
    assert_same_bits(ops.embedding(meta, weight), out)


def test_dead_tokens_and_foreign_ids_are_zeros(device: str) -> None:
    weight = randn(VOCAB, 13, dtype=torch.float32, device=device)
    meta = tokens_of([3, 4, -1, VOCAB, 2**31 - 1, -(2**31)], device)
    meta[1] = 0
    out = poisoned(6, 13, dtype=torch.float32, device=device)
    ops.embedding_into(out, meta, weight)
    assert_same_bits(out[0], weight[3])
    assert_same_bits(out[1:], torch.zeros_like(out[1:]))
    assert_same_bits(out, reference.embedding(meta, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_negative_ids_are_embeddings_that_prompts_bring_along(
    device: str, dtype: torch.dtype, hidden: int
) -> None:
    weight = randn(VOCAB, hidden, dtype=dtype, device=device)
    embeds = randn(5, hidden, dtype=dtype, device=device, seed=1)
    meta = tokens_of([3, -2, -6, -4, 10, -1, -7, -(2**31), -(2**31) + 1, -3], device)
    meta[9] = 0
    out = poisoned(10, hidden, dtype=dtype, device=device)
    ops.embedding_into(out, meta, weight, embeds)
    zeros = torch.zeros_like(weight[:5])
    expected = [weight[3:4], embeds[:1], embeds[4:], embeds[2:3], weight[10:], zeros]
    assert_same_bits(out, torch.cat(expected))
    assert_same_bits(ops.embedding(meta, weight, embeds), out)
    assert_same_bits(reference.embedding(meta, weight, embeds), out)


def test_embeddings_at_any_address(device: str) -> None:
    """Where they are not aligned as the table is, and where there are none."""
    weight = randn(VOCAB, 16, dtype=torch.bfloat16, device=device)
    embeds = randn(3 * 16 + 1, dtype=torch.bfloat16, device=device, seed=1)[1:].view(3, 16)
    meta = tokens_of([-4, 2, -2], device)
    assert_same_bits(
        ops.embedding(meta, weight, embeds), torch.stack([embeds[2], weight[2], embeds[0]])
    )
    none = ops.embedding(meta, weight, embeds[:0])
    assert_same_bits(none[[0, 2]], torch.zeros_like(none[[0, 2]]))
    assert_same_bits(none[1], weight[2])


def test_embedding_into_strided_tokens(device: str) -> None:
    weight = randn(VOCAB, 13, dtype=torch.bfloat16, device=device)
    buffer = poisoned(3, 20, dtype=torch.bfloat16, device=device)
    ops.embedding_into(buffer[:, 2:15], tokens_of([5, 0, 9], device), weight)
    assert_same_bits(buffer[:, 2:15], weight[[5, 0, 9]])
    assert buffer[:, :2].isnan().all()
    assert buffer[:, 15:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_tokens_takes_the_last_token_of_each_segment(
    device: str, dtype: torch.dtype
) -> None:
    x = in_wider_tokens(randn(8, 21, dtype=dtype, device=device))
    segments = ints(
        [[1, 0, 1, 1], [2, 1, 5, 1], [3, 6, 0, 1], [4, 6, 2, 0], [5, 7, 2, 1], [6, -5, 2, 1]],
        device,
    )
    out = poisoned(6, 21, dtype=dtype, device=device)
    ops.select_tokens_into(out, x, segments)
    zeros = torch.zeros(21, dtype=dtype, device=device)
    assert_same_bits(out, torch.stack([x[0], x[5], zeros, x[7], zeros, zeros]))
    expected = poisoned(6, 21, dtype=dtype, device=device)
    reference.select_tokens_into(expected, x, segments)
    assert_same_bits(out, expected)
    assert_same_bits(ops.select_tokens(x, segments), out)


def test_select_tokens_of_no_segments(device: str) -> None:
    out = torch.empty(0, 4, device=device)
    ops.select_tokens_into(out, torch.ones(3, 4, device=device), ints([], device).reshape(0, 4))
