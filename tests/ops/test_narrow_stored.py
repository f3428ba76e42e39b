"""The Hopper linears of weights in fp8, int4 and int8: every number is read, near the float64
reference, and a token has the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import _C, ops, reference
from photon_ext._library import fallbacks
from photon_ext.dequantize import dequantized
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned, randn
from tests.ops.stored import Kind, in_wider_rows, random_weight

BF16, HALF = torch.bfloat16, torch.float16
EPS = 1e-5
KINDS = [
    Kind(WeightFormat.FP8),
    Kind(WeightFormat.FP8, 1, 128),
    Kind(WeightFormat.FP8, 128, 128),
    Kind(WeightFormat.INT4, 1, 128, HALF),
    Kind(WeightFormat.INT4, 1, 128, BF16, True),
    Kind(WeightFormat.INT4, 1, 64, BF16, True),
    Kind(WeightFormat.INT4, 1, 32, HALF),
    Kind(WeightFormat.INT4, 1, 32, HALF, True),
    Kind(WeightFormat.INT4, 1, 32, HALF, offsets=True),
    Kind(WeightFormat.INT8, 1, 32, HALF),
    Kind(WeightFormat.INT8, 1, 16, HALF),
]
# (n, k): one 8-row tile of a part of a K chunk; an odd number of them; of several K chunks whose
# last is not whole, where two parts of the columns exchange sums; of several passes.
SHAPES = [(8, 512), (72, 1536), (40, 4608), (360, 512)]


class Results(NamedTuple):
    norm_linear: Tensor
    linear_residual: Tensor
    norm_swiglu: Tensor


class Operands(NamedTuple):
    """What the three ops take, for n outputs of k inputs."""

    x: Tensor  # [tokens, k]
    norm: Tensor  # [k]
    weight: Weight  # [2n, k]: gate, then up
    half: Weight  # its first n rows
    bias: Tensor  # [2n]
    residual: Tensor  # [tokens, n]

    def tokens(self, first: int, end: int) -> Operands:
        return self._replace(x=self.x[first:end], residual=self.residual[first:end])


def operands(kind: Kind, tokens: int, n: int, k: int, device: str) -> Operands:
    weight = random_weight(kind, 2 * n, k, device)
    half = random_weight(kind, n, k, device, seed=2)
    x, norm, bias, residual = (
        randn(*shape, dtype=BF16, device=device, seed=seed)
        for seed, shape in enumerate([(tokens, k), (k,), (2 * n,), (tokens, n)])
    )
    return Operands(x, norm, weight, half, bias, residual)


def fused(o: Operands, counts: Tensor | None = None, has_workspace: bool = True) -> Results:
    """The three ops by Hopper kernels, into memory that tells what was not written."""
    noted = fallbacks()
    n, device = o.half.n, str(o.x.device)
    out, act = (poisoned(len(o.x), n, dtype=BF16, device=device) for _ in range(2))
    residual = o.residual.clone()
    words = ops.linear_workspace_words(*o.x.shape)
    workspace = poisoned(words, dtype=torch.float32, device=device) if has_workspace else None
    last = counts, True, False, workspace
    ops.norm_linear_into(out, o.x, o.norm, EPS, o.half, o.bias[:n], *last)
    ops.linear_residual_(residual, o.x, o.half, o.bias[:n], *last)
    ops.norm_swiglu_into(act, o.x, o.norm, EPS, o.weight, o.bias, *last)
    assert fallbacks() == noted, "where Hopper kernels run, none gave way to a portable one"
    if o.x.is_cuda:
        torch.cuda.synchronize()  # compute-sanitizer keeps 0.7 GB of each launch until then
    return Results(out, residual, act)


def exact(o: Operands) -> Results:
    n, wide = o.half.n, o.x.double()
    half, weight = (dequantized(one).double() for one in (o.half, o.weight))
    residual = o.residual.double()
    reference.linear_residual_(residual, wide, half, o.bias[:n].double())
    return Results(
        reference.norm_linear(wide, o.norm.double(), EPS, half, o.bias[:n].double()),
        residual,
        reference.norm_swiglu(wide, o.norm.double(), EPS, weight, o.bias.double()),
    )


def in_groups(o: Operands, most: int) -> Results:
    pieces = [fused(o.tokens(i, i + most)) for i in range(0, len(o.x), most)]
    return Results(*map(torch.cat, zip(*pieces, strict=True)))


def assert_same_results(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


def assert_same_in_groups(o: Operands, sizes: Sequence[int]) -> None:
    together = fused(o)
    for size in sizes:
        assert_same_results(in_groups(o, size), together)


def assert_near_float64(o: Operands) -> None:
    for actual, expected in zip(fused(o), exact(o), strict=True):
        assert_close(actual, expected, slack=2)


@pytest.mark.emulated_later(k=(1536, 4608))
@pytest.mark.parametrize("tokens", [1, 8, 13, 30, 35])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_near_the_float64_reference(
    device: str, kind: Kind, n: int, k: int, tokens: int
) -> None:
    assert_near_float64(operands(kind, tokens, n, k, device))


@pytest.mark.emulated_later(k=(1536, 4608))
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(device: str, kind: Kind, n: int, k: int) -> None:
    assert_same_in_groups(operands(kind, 35, n, k, device), (1, 3, 8, 9, 16, 17))


# (n, k): several stages by several K chunks; sums of several CTAs; several passes, of 9 and 8 tiles
# where a result is stored and of 4 to 1 where it is added.
MODELS = [(12288, 4096), (4096, 12288), (33800, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(("n", "k"), MODELS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shapes_of_models(kind: Kind, tokens: int, n: int, k: int) -> None:
    assert_near_float64(operands(kind, tokens, n, k, "cuda"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.rows == 1], ids=str)
def test_a_scale_that_is_nan_leaves_other_rows_alone(device: str, kind: Kind) -> None:
    """In the last tile of a pass, too, whose products are pending when the next one begins."""
    o = operands(kind, 3, 360, 512, device)
    rows = torch.arange(360, device=device)
    bad = (rows // 8 % 4 == 0) & (rows % 8 == 5)
    assert o.half.scale is not None
    scale = o.half.scale.clone()
    scale[bad, -1] = float("nan")
    found, whole = fused(o._replace(half=replace(o.half, scale=scale))), fused(o)
    for one, other in zip(found[:2], whole[:2], strict=True):
        assert one[:, bad].isnan().all()
        assert_same_bits(one[:, ~bad], other[:, ~bad])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_is_read_and_scaled_as_the_reference_does(device: str, kind: Kind) -> None:
    """One column at a time; int4 takes 128 and the zero point out of sums in float32."""
    weight = random_weight(kind, 40, 512, device)
    numbers = dequantized(weight)
    found = []
    for columns in torch.eye(512, dtype=BF16, device=device).split(16):
        out = torch.zeros(len(columns), 40, dtype=BF16, device=device)
        ops.linear_residual_(out, columns, weight, hopper=True)
        found.append(out)
    torch.testing.assert_close(torch.cat(found).T, numbers.bfloat16(), rtol=2**-8, atol=0)


def test_every_finite_e4m3_is_read(device: str) -> None:
    """Subnormal ones, too; NaN stays what it is, or is read as 480."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = Weight(
        codes[:, None].repeat(1, 128), WeightFormat.FP8, torch.ones(256, 1, device=device)
    )
    x = torch.zeros(1, 128, dtype=BF16, device=device)
    x[0, 77] = 1.0
    out = torch.zeros(1, 256, dtype=BF16, device=device)
    ops.linear_residual_(out, x, weight, hopper=True)
    values = codes.float()
    finite = ~values.isnan()
    assert torch.equal(out[0][finite].float(), values[finite])
    assert all(value.isnan() or value.abs() == 480 for value in out[0][~finite])


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=str)
@pytest.mark.parametrize("tokens", [7, 16, 29, 36])
def test_only_counted_tokens_are_computed(device: str, kind: Kind, tokens: int) -> None:
    o = operands(kind, tokens, 72, 512, device)
    whole = fused(o)
    for counts in (-1, 0, 1, 7, 8, 9, 15, 17, 31, 33, 99):
        done = min(max(counts, 0), tokens)
        actual = fused(o, ints([counts], device))
        for one, other in zip(actual, whole, strict=True):
            assert_same_bits(one[:done], other[:done])
        assert actual.norm_linear[done:].isnan().all()
        assert actual.norm_swiglu[done:].isnan().all()
        assert_same_bits(actual.linear_residual[done:], o.residual[done:])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_rows_may_lie_apart(device: str, kind: Kind) -> None:
    o = operands(kind, 3, 40, 512, device)
    apart = o._replace(half=in_wider_rows(o.half, 48))
    assert_same_results(fused(apart), fused(o))


@pytest.mark.parametrize("kind", [KINDS[6], *KINDS[8:]], ids=str)
def test_scales_of_few_columns_that_lie_between_vectors_are_read_by_portable_kernels(
    device: str, kind: Kind
) -> None:
    """They would be read 8 or 16 bytes at a time."""
    weight = random_weight(kind, 16, 512, device)
    assert weight.scale is not None
    apart = torch.empty(weight.scale.numel() + 2, dtype=weight.scale.dtype, device=device)[2:]
    moved = replace(weight, scale=apart.view_as(weight.scale).copy_(weight.scale))
    x, residual = (randn(17, n, dtype=BF16, device=device) for n in (512, 16))
    expected = residual.clone()
    ops.linear_residual_(expected, x, weight)
    ops.linear_residual_(residual, x, moved, hopper=True)
    assert_same_bits(residual, expected)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"format": "q4_0"}, "of weights of fewer bits they read fp8, int4 and int8"),
        ({"format": "fp8", "k": 192}, "columns of fp8 are no multiple of 128 (192)"),
        ({"format": "int4", "k": 384}, "columns of integers are no multiple of 256 (384)"),
        ({"format": "int8", "k": 384}, "columns of integers are no multiple of 256 (384)"),
        ({"format": "int4"}, "scales of integers are float32, and they read those of 16 bits"),
        (
            {"format": "int8", "scale_dtype": "bfloat16", "scale_columns": 32},
            "scales of int8, or beside offsets, are not float16",
        ),
        (
            {"format": "int8", "scale_dtype": "float16", "scale_columns": 64},
            "groups of int8 have not 16 or 32 columns (64)",
        ),
        (
            {"format": "int4", "scale_dtype": "float16", "scale_columns": 64, "offsets": True},
            "groups of int4 with offsets have not 32 columns (64)",
        ),
        (
            {"format": "int4", "scale_dtype": "float16", "scale_columns": 512},
            "groups of int4 have not 32, 64 or 128 columns (512)",
        ),
        (
            {"format": "int4", "scale_dtype": "float16", "k": 768, "zeros": True},
            "the groups of a row with zero points are no multiple of 4 (6)",
        ),
        ({"format": "fp8", "n": 20}, "the number of outputs is no multiple of 8 (20)"),
        (
            {"format": "fp8", "dtype": "float16"},
            "the dtype is not bfloat16",
        ),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else "",
)
def test_what_hopper_kernels_do_not_read_of_weights_of_fewer_bits(
    asked: dict[str, object], why: str
) -> None:
    given = {"op": "norm_linear_into", "dtype": "bfloat16", "tokens": 1, "n": 64, "k": 512}
    kernel, found = _C.plan_linear(_C.Gpu(9, 0), **(given | asked))  # type: ignore[arg-type]
    assert (kernel, found) == ("tile", why)
