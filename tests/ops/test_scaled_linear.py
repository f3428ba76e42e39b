"""Linears of fp8 weights with scales: near the float64 reference, the same bits alone and in a
batch and in every op, and clear errors where weight and scales do not belong together.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import _C, ops, reference
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    ints,
    poisoned,
    randn,
)

FP8 = torch.float8_e4m3fn
EPS = 1e-5
# (n, k, rows and columns that share a scale): none a multiple of another; several blocks of either.
CASES = [(5, 7, 1, 7), (130, 577, 1, 128), (260, 392, 128, 128), (64, 1553, 1, 1553)]


class Stored(NamedTuple):
    weight: Tensor  # [n, k]
    scale: Tensor


def stored(n: int, k: int, rows: int, columns: int, device: str, seed: int = 1) -> Stored:
    """Products with normal inputs are near 1; scales differ by up to ten times."""
    weight = (100 * randn(n, k, dtype=torch.float32, device="cpu", seed=seed)).clamp(-448, 448)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(-(-n // rows), -(-k // columns), generator=generator) + 0.1
    scale *= 0.01 * k**-0.5
    return Stored(weight.to(FP8).to(device), scale.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scaled_linear_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, case: tuple[int, int, int, int]
) -> None:
    n, k, *_ = case
    weight, scale = stored(*case, device)
    x, bias = (randn(*shape, dtype=dtype, device=device) for shape in ((19, k), (n,)))
    out = poisoned(19, n, dtype=dtype, device=device)
    ops.linear_into(out, x, weight, bias, weight_scale=scale)
    exact = reference.linear(x.double(), weight, bias.double(), weight_scale=scale)
    assert_close(out, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_alone_has_the_bits_it_has_in_a_batch_of_a_scaled_linear(
    device: str, dtype: torch.dtype, case: tuple[int, int, int, int]
) -> None:
    weight, scale = stored(*case, device)
    x = randn(50, case[1], dtype=dtype, device=device)
    together = ops.linear(x, weight, weight_scale=scale)
    for size in (1, 2, 3, 17):
        parts = [ops.linear(part, weight, weight_scale=scale) for part in x.split(size)]
        assert_same_bits(torch.cat(parts), together)
    alone = poisoned(case[0], dtype=dtype, device=device)
    ops.gemv_into(alone, x[7], weight, weight_scale=scale)
    assert_same_bits(alone, together[7])


def test_every_finite_e4m3_is_read_exactly(device: str) -> None:
    """By one token and by several; the others are read as 480, as the docs say."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)[:, None]
    values = codes.float()[:, 0]
    scale = torch.ones(256, 1, device=device)
    for tokens in (1, 5):
        out = ops.linear(torch.ones(tokens, 1, device=device), codes, weight_scale=scale)[-1]
        finite = ~values.isnan()
        assert torch.equal(out[finite], values[finite])
        assert out[~finite].abs().tolist() == [480.0, 480.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "gap"), [(264, 0), (264, 5), (77, 0)])
def test_fused_ops_have_the_bits_of_the_separate_ones_with_scales(
    device: str, dtype: torch.dtype, k: int, gap: int
) -> None:
    """In vectors and not, with counts; weights lie nowhere aligned where there is a gap."""
    n, tokens, width = 140, 6, 70
    gate_up, scale = stored(n, k, 1, 128, device)
    weight = in_wider_bytes(gate_up, gap)
    x, norm, bias, residual, gain = (
        randn(*shape, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate([(tokens, k), (k,), (n,), (tokens, n), (n,)])
    )
    x = in_wider_tokens(x) if gap else x
    counts, scales = ints([tokens - 1], device), {"weight_scale": scale}
    normed = torch.empty(tokens, k, dtype=dtype, device=device)
    ops.rms_norm_into(normed, x, norm, EPS)

    def empty(columns: int) -> Tensor:
        return torch.zeros(tokens, columns, dtype=dtype, device=device)

    out, y = empty(n), ops.linear(normed, weight, bias, **scales)
    ops.norm_linear_into(out, x, norm, EPS, weight, bias, counts, **scales)
    assert_same_bits(out[:-1], y[:-1])
    assert not out[-1].any()

    act = ops.silu_mul(y)
    fused, plain = empty(width), empty(width)
    ops.norm_swiglu_into(fused, x, norm, EPS, gate_up, bias, **scales)
    assert_same_bits(fused, act)
    ops.swiglu_into(plain, normed, gate_up, bias, **scales)
    assert_same_bits(plain, act)

    added, normalized, also = residual.clone(), empty(n), residual.clone()
    product = ops.linear(x, weight, bias, **scales)
    ops.linear_residual_(added, x, weight, bias, **scales)
    assert_same_bits(added, residual + product)
    ops.linear_norm_into(normalized, also, x, weight, gain, EPS, bias, **scales)
    assert_same_bits(also, added)
    again = empty(n)
    ops.rms_norm_into(again, added, gain, EPS)
    assert_same_bits(normalized, again)


def in_wider_bytes(weight: Tensor, extra: int) -> Tensor:
    """A copy of weight [n, k] whose rows are `extra` bytes apart."""
    buffer = weight.new_zeros(len(weight), weight.shape[1] + extra, dtype=torch.uint8)
    view = buffer[:, : weight.shape[1]]
    view.copy_(weight.view(torch.uint8))
    return view.view(FP8)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, "weight_scale is None, expected float32 [n, 1], [n, ceil(k / 128)] or"),
        ((130,), "weight_scale has shape [130], expected 2 dimensions"),
        ((130, 2), "weight_scale has shape [130, 2], expected [130, 3]"),
        ((3, 3), "weight_scale has shape [3, 3], expected [2, 3]"),
        ((2, 1), "weight_scale has shape [2, 1], expected [2, 3]"),
    ],
)
def test_scales_that_do_not_belong_to_the_weight_are_refused(
    shape: tuple[int, ...] | None, message: str
) -> None:
    weight, _ = stored(130, 300, 1, 128, "cpu")
    scale = None if shape is None else torch.ones(shape)
    with pytest.raises(RuntimeError, match=re.escape(f"linear_into: {message}")):
        ops.linear(torch.zeros(2, 300), weight, weight_scale=scale)


def test_scales_of_another_dtype_or_of_a_dense_weight_are_refused() -> None:
    weight, scale = stored(4, 6, 1, 6, "cpu")
    x = torch.zeros(2, 6)
    with pytest.raises(RuntimeError, match="weight_scale has dtype bfloat16, expected float32"):
        ops.linear(x, weight, weight_scale=scale.bfloat16())
    with pytest.raises(RuntimeError, match="weight_scale is a tensor, expected None, because w"):
        ops.linear(x, torch.zeros(4, 6), weight_scale=scale)
    with pytest.raises(RuntimeError, match="weight has dtype float8_e5m2, expected float32, the d"):
        ops.linear(x, weight.float().to(torch.float8_e5m2), weight_scale=scale)
    out = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="out shares memory with weight_scale"):
        ops.linear_into(out, x, weight, weight_scale=out.view(-1)[:4, None])


def test_hopper_kernels_say_that_they_read_no_scales() -> None:
    h200 = _C.Gpu(9, 0, False)
    kernel, why = _C.plan_linear(h200, "norm_linear_into", "bfloat16", 1, 64, 64, dense=False)
    assert (kernel, why) == (
        "tile",
        "the weight is stored in fewer bits, and they read bfloat16 alone",
    )
