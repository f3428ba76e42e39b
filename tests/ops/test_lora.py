"""lora_shrink and lora_expand: near the float64 reference, whatever rows share a step, and nothing
but the tokens that have an adapter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.layout import RowColumn
from tests.ops.caches import tokens_and_segments
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    poisoned,
    randn,
)
from tests.ops.tables import row_state

# rows of the table by slot: none, each of three, one that cannot be, and a negative one
SLOTS = (0, 1, 2, 3, 4, -1)


def described(rows: list[int], device: str) -> tuple[Tensor, Tensor]:
    """decode_meta of a token for each of these rows, 0 being a dead one, and the table, whose row r
    has slot SLOTS[r - 1].
    """
    table = row_state(
        device,
        {row: {RowColumn.LORA_SLOT: slot} for row, slot in enumerate(SLOTS, 1)},
        1 + len(SLOTS),
    )
    meta, _ = tokens_and_segments([(row, 3, 1) for row in rows], device)
    meta[[i for i, row in enumerate(rows) if row == 0]] = 0
    return meta, table


def live(rows: list[int]) -> list[int]:
    """Tokens that have an adapter."""
    return [i for i, row in enumerate(rows) if row in (2, 3, 4)]


MIXED = [2, 3, 0, 4, 1, 2, 3, 5, 6, 2, 2]


def widened(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts_rows", "k"), [(1, 1), (6, 40), (13, 577), (24, 2064)])
@pytest.mark.parametrize("repeats", [1, 7])
def test_shrink_is_near_the_reference(
    device: str, dtype: torch.dtype, parts_rows: int, k: int, repeats: int
) -> None:
    rows = MIXED * repeats
    meta, table = described(rows, device)
    x = randn(len(rows), k, dtype=dtype, device=device)
    a = randn(3, parts_rows, k, dtype=dtype, device=device, seed=1) / k**0.5
    out = poisoned(len(rows), parts_rows, dtype=dtype, device=device)
    ops.lora_shrink_into(out, x, a, meta, table)
    exact = torch.zeros(len(rows), parts_rows, dtype=torch.float64, device=device)
    reference.lora_shrink_into(exact, *widened(x, a), meta, table)
    kept = live(rows)
    assert_close(out[kept], exact[kept], slack=2)
    assert torch.isnan(out[[i for i in range(len(rows)) if i not in kept]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first_rows", "other_rows", "parts"), [(1, 0, 1), (130, 0, 1), (5, 5, 2), (96, 40, 3)]
)
@pytest.mark.parametrize("rank", [1, 8, 20])
def test_expand_is_near_the_reference(
    device: str, dtype: torch.dtype, first_rows: int, other_rows: int, parts: int, rank: int
) -> None:
    meta, table = described(MIXED, device)
    n = first_rows + (parts - 1) * other_rows
    out = randn(len(MIXED), n, dtype=dtype, device=device)
    h = randn(len(MIXED), parts * rank, dtype=dtype, device=device, seed=1)
    b = randn(3, n, rank, dtype=dtype, device=device, seed=2)
    exact, wide_h, wide_b = widened(out, h, b)
    before = out.clone()
    ops.lora_expand_(out, h, b, meta, table, first_rows)
    reference.lora_expand_(exact, wide_h, wide_b, meta, table, first_rows)
    assert_close(out, exact)
    untouched = [i for i in range(len(MIXED)) if i not in live(MIXED)]
    assert_same_bits(out[untouched], before[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[3], MIXED, [4] * 70 + MIXED])
def test_a_token_has_the_same_bits_in_every_step(
    device: str, dtype: torch.dtype, rows: list[int]
) -> None:
    meta, table = described(rows, device)
    x = randn(len(rows), 320, dtype=dtype, device=device)
    a = randn(3, 16, 320, dtype=dtype, device=device, seed=1)
    b = randn(3, 48, 8, dtype=dtype, device=device, seed=2)
    h = ops.lora_shrink(x, a, meta, table)
    out = ops.lora_expand(x[:, :48].clone(), h, b, meta, table, 24)
    for i in live(rows):
        one = slice(i, i + 1)
        alone = ops.lora_shrink(x[one], a, meta[one], table)
        assert_same_bits(alone, h[one])
        assert_same_bits(
            ops.lora_expand(x[one, :48].clone(), alone, b, meta[one], table, 24), out[one]
        )


def test_strides_change_no_bit_and_slots_may_lie_apart(device: str) -> None:
    meta, table = described(MIXED, device)
    x = randn(len(MIXED), 64, dtype=torch.bfloat16, device=device)
    memory = randn(3, 16 * 64 + 40 * 8 + 8, dtype=torch.bfloat16, device=device, seed=1)
    a = memory[:, : 16 * 64].view(3, 16, 64)
    b = memory[:, 16 * 64 : 16 * 64 + 40 * 8].view(3, 40, 8)
    h = ops.lora_shrink(x, a, meta, table)
    assert_same_bits(ops.lora_shrink(in_wider_tokens(x), a.contiguous(), meta, table), h)
    out = ops.lora_expand(x[:, :40], h, b, meta, table, 20)
    wide = in_wider_tokens(x[:, :40].contiguous())
    ops.lora_expand_(wide, in_wider_tokens(h), b.contiguous(), meta, table, 20)
    assert_same_bits(wide, out)


@pytest.mark.parametrize("tokens", [0, 3])
def test_without_adapters_nothing_is_written(device: str, tokens: int) -> None:
    meta, table = described([1] * tokens, device)
    x = randn(tokens, 16, dtype=torch.float32, device=device)
    out = poisoned(tokens, 8, dtype=torch.float32, device=device)
    ops.lora_shrink_into(out, x, torch.ones(2, 8, 16, device=device), meta, table)
    assert torch.isnan(out).all()
    before = x.clone()
    ops.lora_expand_(x, out, torch.ones(2, 16, 8, device=device), meta, table, 16)
    assert_same_bits(x, before)
