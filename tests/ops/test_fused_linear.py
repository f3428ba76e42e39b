"""norm_linear, linear_residual and norm_swiglu: the bits of the separate ops, and near the float64 reference however they are computed."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import ops
from tests.ops.numeric import DTYPES, assert_same_bits, poisoned, randn

EPS = 1e-5
LINES = [0, 1, 2, 3, 5, 8, 9, 33, 64]
# (n, k): odd ones, k not a multiple of 8 or of 32, one whole pack of 32 lanes and a bit, and one that shared memory takes in pieces.
SHAPES = [(1, 1), (7, 40), (100, 577), (70, 576), (7, 4360)]


class Operands(NamedTuple):
    """What the three ops take, for n outputs of k inputs. The SwiGLU has n gate rows and n up rows."""

    x: Tensor  # [lines, k]
    norm: Tensor  # [k]
    weight: Tensor  # [2n, k]; the other ops take the first n rows
    bias: Tensor  # [2n]
    residual: Tensor  # [lines, n]


def operands(lines: int, n: int, k: int, dtype: torch.dtype, device: str) -> Operands:
    shapes = ((lines, k), (k,), (2 * n, k), (2 * n,), (lines, n))
    made = [randn(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    made[2].div_(k**0.5)  # products near 1, so that no activation saturates
    return Operands(*made)


class Results(NamedTuple):
    norm_linear: Tensor
    linear_residual: Tensor
    norm_swiglu: Tensor


def fused(o: Operands, with_bias: bool, fast: bool = False, extent: Tensor | None = None) -> Results:
    """The three ops, into memory that tells what was not written."""
    n = o.residual.shape[1]
    bias = o.bias if with_bias else None
    half = o.bias[:n] if with_bias else None
    out, residual, act = (poisoned(len(o.x), n, dtype=o.x.dtype, device=str(o.x.device)) for _ in range(3))
    residual.copy_(o.residual)
    ops.norm_linear_into(out, o.x, o.norm, EPS, o.weight[:n], half, extent, fast)
    ops.linear_residual_(residual, o.x, o.weight[:n], half, extent, fast)
    ops.norm_swiglu_into(act, o.x, o.norm, EPS, o.weight, bias, extent, fast)
    return Results(out, residual, act)


def separate(o: Operands, with_bias: bool) -> Results:
    """What they stand for, an op at a time."""
    n = o.residual.shape[1]
    bias = o.bias if with_bias else None
    half = o.bias[:n] if with_bias else None
    normed = ops.rms_norm(o.x, o.norm, EPS)
    return Results(
        ops.linear(normed, o.weight[:n], half),
        o.residual + ops.linear(o.x, o.weight[:n], half),
        ops.silu_mul(ops.linear(normed, o.weight, bias)),
    )


def assert_same_results(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_bits_are_those_of_the_separate_ops(device: str, dtype: torch.dtype, lines: int, n: int, k: int, with_bias: bool) -> None:
    o = operands(lines, n, k, dtype, device)
    assert_same_results(fused(o, with_bias), separate(o, with_bias))
