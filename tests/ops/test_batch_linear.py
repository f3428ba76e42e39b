"""linear_into, swiglu_into and linear_norm_into, in the kernels for a batch of tokens and in the
portable ones: near the float64 reference, whatever other tokens are.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from photon_ext._library import fallbacks
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    ints,
    poisoned,
    randn,
)

EPS = 1e-5
# One K block; outputs that end within a tile and within its eights; parts of the columns
# that are unequal; more K blocks than the rings have stages.
SHAPES = [(8, 64), (72, 320), (264, 576), (40, 2240)]
# At 65 to 128 tokens: tiles of 128 tokens in every op; with more of 64 in one, two CTAs an SM. All
# sizes of tiles that four models have.
WIDE = [(3200, 128)]
MODELS = [(6144, 2560), (2560, 4096), (9728, 2560), (2560, 9728), (12288, 4096)]
MODELS += [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (8192, 2048), (2048, 2048)]


class Operands(NamedTuple):
    x: Tensor  # [tokens, k]
    weight: Tensor  # [2n, k]: of SwiGLU; of the others the first n rows
    bias: Tensor | None  # [2n]
    residual: Tensor  # [tokens, n]
    norm: Tensor  # [n]


def operands(
    num_tokens: int,
    n: int,
    k: int,
    device: str,
    with_bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Operands:
    x, weight, bias, residual, norm = (
        randn(*shape, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate([(num_tokens, k), (2 * n, k), (2 * n,), (num_tokens, n), (n,)])
    )
    weight /= k**0.5  # products near 1, so that no activation saturates
    return Operands(x, weight, bias if with_bias else None, residual, norm)


class Results(NamedTuple):
    linear: Tensor
    swiglu: Tensor
    residual: Tensor
    normed: Tensor


def run(
    o: Operands,
    counts: Tensor | None = None,
    hopper: bool = True,
    gap: int = 0,
    has_workspace: bool = True,
) -> Results:
    """The three ops, into memory that tells what was not written, its tokens `gap` elements
    apart.
    """
    num_tokens, n = o.residual.shape
    out, act, normed = (
        poisoned(num_tokens, n, dtype=o.x.dtype, device=str(o.x.device)) for _ in range(3)
    )
    residual = o.residual.clone()
    if gap:
        out, act, residual, normed = (
            in_wider_tokens(each, gap) for each in (out, act, residual, normed)
        )
    words = ops.linear_norm_workspace_words(num_tokens, n)
    workspace = torch.full((words,), torch.nan, device=o.x.device) if has_workspace else None
    weight, bias = o.weight[:n], None if o.bias is None else o.bias[:n]
    ops.linear_into(out, o.x, weight, bias, counts, hopper)
    ops.swiglu_into(act, o.x, o.weight, o.bias, counts, hopper)
    ops.linear_norm_into(
        normed, residual, o.x, weight, o.norm, EPS, bias, counts, hopper, workspace=workspace
    )
    return Results(out, act, residual, normed)


def exact(o: Operands) -> Results:
    wide = Operands(*(None if each is None else each.double() for each in o))
    n = len(o.norm)
    act, normed = (torch.empty_like(wide.residual) for _ in range(2))
    reference.swiglu_into(act, wide.x, wide.weight, wide.bias)
    bias, residual = None if wide.bias is None else wide.bias[:n], wide.residual.clone()
    reference.linear_norm_into(normed, residual, wide.x, wide.weight[:n], wide.norm, EPS, bias)
    return Results(reference.linear(wide.x, wide.weight[:n], bias), act, residual, normed)


def assert_near(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, slack=2)


def among_strangers(x: Tensor, residual: Tensor) -> dict[str, Tensor]:
    """Both, whose every ninth token stays."""
    keeps = torch.arange(len(x), device=x.device)[:, None] % 9 == 3
    return {
        "x": torch.where(keeps, x, -3 * x.flip(0)),
        "residual": torch.where(keeps, residual, residual.flip(0)),
    }


def assert_same_every_ninth(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one[3::9], other[3::9])


def assert_same(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.emulated_later(n=(264,), num_tokens=(130,))
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 65, 100, 128, 130])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_results_are_near_the_float64_reference(
    device: str, num_tokens: int, n: int, k: int, with_bias: bool
) -> None:
    o = operands(num_tokens, n, k, device, with_bias)
    noted = fallbacks()
    assert_near(run(o), exact(o))
    assert fallbacks() == noted  # where Hopper kernels run, none gave way to a portable one


@pytest.mark.parametrize("num_tokens", [64, 65, 129])
@pytest.mark.parametrize(("n", "k"), WIDE)
def test_tiles_of_128_tokens(device: str, num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, device)
    assert_near(run(o), exact(o))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [33, 64, 100, 128, 192, 256])
@pytest.mark.parametrize(("n", "k"), MODELS)
def test_shapes_of_models(num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, "cuda", with_bias=n == 1024)
    assert_near(run(o), exact(o))


@pytest.mark.emulated_later(n=(3200,))
@pytest.mark.parametrize("num_tokens", [64, 100])
@pytest.mark.parametrize(("n", "k"), [(72, 320), *WIDE])
def test_a_token_has_the_same_bits_whatever_others_are(
    device: str, num_tokens: int, n: int, k: int
) -> None:
    o = operands(num_tokens, n, k, device)
    first = run(o)
    assert_same_every_ninth(first, run(o._replace(**among_strangers(o.x, o.residual))))
    assert_same(run(o), first)


@pytest.mark.emulated_later(num_tokens=(130,))
@pytest.mark.parametrize("num_tokens", [64, 130])
@pytest.mark.parametrize(("n", "k"), [(72, 320), (40, 64)])
@pytest.mark.parametrize("hopper", [False, True])
def test_counts_computes_the_leading_tokens_only(
    device: str, num_tokens: int, n: int, k: int, hopper: bool
) -> None:
    o = operands(num_tokens, n, k, device)
    whole = run(o, hopper=hopper)
    for counts in (-(2**31), 0, 1, 63, 64, 65, 129, 2**31 - 1):
        done = min(max(counts, 0), num_tokens)
        actual = run(o, ints([counts], device), hopper)
        for one, other in zip(actual, whole, strict=True):
            assert_same_bits(one[:done], other[:done])
        for one in (actual.linear, actual.swiglu, actual.normed):
            assert one[done:].isnan().all()
        assert_same_bits(actual.residual[done:], o.residual[done:])


@pytest.mark.parametrize("gap", [5, 16])  # 16: tokens stay aligned
@pytest.mark.parametrize("hopper", [False, True])
def test_strided_tokens_leave_the_gaps_alone(device: str, gap: int, hopper: bool) -> None:
    n, num_tokens = 72, 70
    o = operands(num_tokens, n, 192, device)
    actual = run(o._replace(x=in_wider_tokens(o.x, gap)), hopper=hopper, gap=gap)
    assert_near(actual, exact(o))
    for one in actual:
        buffer = one.as_strided((num_tokens, n + gap), (n + gap, 1), 0)
        assert int(buffer.isnan().sum()) == num_tokens * gap


@pytest.mark.emulated_later
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 40), (100, 577)])
def test_the_portable_bits_are_those_of_the_separate_ops(
    device: str, dtype: torch.dtype, num_tokens: int, n: int, k: int
) -> None:
    o = operands(num_tokens, n, k, device, dtype=dtype)
    assert o.bias is not None
    linear = ops.linear(o.x, o.weight[:n], o.bias[:n])
    residual = o.residual + linear
    separate = Results(
        linear,
        ops.silu_mul(ops.linear(o.x, o.weight, o.bias)),
        residual,
        ops.rms_norm(residual, o.norm, EPS),
    )
    assert_same(run(o, hopper=False), separate)
    assert_same(run(o, hopper=True), separate)  # none of the shapes fits


@pytest.mark.emulated_later
@pytest.mark.parametrize(("n", "k"), [(72, 72), (36, 64)])
def test_sizes_that_no_hopper_kernel_takes_have_the_portable_bits(
    device: str, n: int, k: int
) -> None:
    o = operands(65, n, k, device)
    assert_same(run(o), run(o, hopper=False))


@pytest.mark.emulated_later
def test_without_a_workspace_the_portable_kernels_add_to_the_residual(device: str) -> None:
    o = operands(65, 72, 64, device)
    actual, portable = run(o, has_workspace=False), run(o, hopper=False)
    assert_same_bits(actual.residual, portable.residual)
    assert_same_bits(actual.normed, portable.normed)


@pytest.mark.emulated_later(n=(16384,))
@pytest.mark.parametrize("n", [4104, 16384])
def test_outputs_of_many_columns_are_normalized_by_fewer_threads(device: str, n: int) -> None:
    o = operands(3, n, 64, device, with_bias=n == 4104)
    assert_near(run(o), exact(o))


@pytest.mark.parametrize("counts", [None, 2])
def test_the_reference_writes_what_the_ops_write(device: str, counts: int | None) -> None:
    o = operands(3, 10, 24, device, dtype=torch.float32)
    assert o.bias is not None
    num_tokens = None if counts is None else ints([counts], device)
    out, act, normed = (torch.full_like(o.residual, torch.nan) for _ in range(3))
    residual, weight, bias = o.residual.clone(), o.weight[:10], o.bias[:10]
    reference.linear_into(out, o.x, weight, bias, num_tokens, hopper=True)
    reference.swiglu_into(act, o.x, o.weight, o.bias, num_tokens, hopper=True)
    reference.linear_norm_into(normed, residual, o.x, weight, o.norm, EPS, bias, num_tokens)
    expected = Results(out, act, residual, normed)
    for one, other in zip(run(o, num_tokens), expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
