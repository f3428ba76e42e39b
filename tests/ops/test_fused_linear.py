"""norm_linear, linear_residual and norm_swiglu: the bits of the separate ops, and near the
float64 reference whichever kernels run.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import _C, num_threads, ops, reference, set_num_threads
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
# (n, k): one element; k of whole packs of 8 but not of 32; k of neither; k of many packs.
SHAPES = [(1, 1), (7, 40), (100, 577), (100, 576)]
# For the Hopper kernels, which want k of whole blocks of 64: n of whole tiles of 16; of one
# 8-row tile, whose columns two blocks share; of an odd number of them; of no whole 8-row tiles; of
# several passes.
ALIGNED = [(64, 64), (8, 1088), (72, 320), (21, 192), (264, 576)]

# For the groups of tokens: few tiles, which 17 tokens share out; the same where two parts of the
# columns exchange sums; many tiles; and with six sms two passes of an exchange.
NOT_BFLOAT16 = (torch.float32, torch.float16)
GROUPED = [(72, 320), (80, 1088), (264, 576), (120, 1088)]


class Operands(NamedTuple):
    """What the three ops take, for n outputs of k inputs."""

    x: Tensor  # [tokens, k]
    norm: Tensor  # [k]
    weight: Tensor  # [n, k]
    bias: Tensor | None  # [n]
    gate_up: Tensor  # [2n, k]
    gate_up_bias: Tensor | None  # [2n]
    residual: Tensor  # [tokens, n]


def operands(
    num_tokens: int, n: int, k: int, dtype: torch.dtype, device: str, with_bias: bool = True
) -> Operands:
    x, norm, weight, bias, residual = (
        randn(*shape, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate([(num_tokens, k), (k,), (2 * n, k), (2 * n,), (num_tokens, n)])
    )
    weight /= k**0.5  # products near 1, so that no activation saturates
    return Operands(
        x,
        norm,
        weight[n:],
        bias[n:] if with_bias else None,
        weight,
        bias if with_bias else None,
        residual,
    )


class Results(NamedTuple):
    norm_linear: Tensor
    linear_residual: Tensor
    norm_swiglu: Tensor


def fused(
    o: Operands,
    hopper: bool = False,
    counts: Tensor | None = None,
    gap: int = 0,
    workspace: Tensor | None = None,
) -> Results:
    """The three ops, into memory that tells what was not written, its tokens `gap` elements
    apart.
    """
    num_tokens, n = o.residual.shape
    out, act = (poisoned(num_tokens, n, dtype=o.x.dtype, device=str(o.x.device)) for _ in range(2))
    residual = o.residual.clone()
    if gap:
        out, residual, act = (in_wider_tokens(x, gap) for x in (out, residual, act))
    ops.norm_linear_into(
        out, o.x, o.norm, EPS, o.weight, o.bias, counts, hopper, workspace=workspace
    )
    ops.linear_residual_(residual, o.x, o.weight, o.bias, counts, hopper)
    ops.norm_swiglu_into(
        act, o.x, o.norm, EPS, o.gate_up, o.gate_up_bias, counts, hopper, workspace=workspace
    )
    return Results(out, residual, act)


def separate(o: Operands) -> Results:
    """What they stand for, an op at a time."""
    normed = ops.rms_norm(o.x, o.norm, EPS)
    return Results(
        ops.linear(normed, o.weight, o.bias),
        o.residual + ops.linear(o.x, o.weight, o.bias),
        ops.silu_mul(ops.linear(normed, o.gate_up, o.gate_up_bias)),
    )


def exact(o: Operands) -> Results:
    wide = Operands(*(None if tensor is None else tensor.double() for tensor in o))
    residual = wide.residual.clone()
    reference.linear_residual_(residual, wide.x, wide.weight, wide.bias)
    return Results(
        reference.norm_linear(wide.x, wide.norm, EPS, wide.weight, wide.bias),
        residual,
        reference.norm_swiglu(wide.x, wide.norm, EPS, wide.gate_up, wide.gate_up_bias),
    )


def assert_leading_tokens_only(
    o: Operands,
    counts: Tensor,
    done: int,
    expected: Results,
    hopper: bool = True,
    workspace: Tensor | None = None,
) -> None:
    """With this counts the ops compute the first `done` tokens of `expected`, and write no
    other.
    """
    actual = fused(o, hopper, counts, workspace=workspace)
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one[:done], other[:done])
    assert actual.norm_linear[done:].isnan().all()
    assert actual.norm_swiglu[done:].isnan().all()
    assert_same_bits(actual.linear_residual[done:], o.residual[done:])


def assert_same_results(actual: Results, expected: Results) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


def some_tokens(o: Operands, first: int, end: int) -> Operands:
    return o._replace(x=o.x[first:end], residual=o.residual[first:end])


def in_groups(o: Operands, most: int = 64, hopper: bool = True) -> Results:
    """Up to `most` tokens at a time."""
    pieces = [fused(some_tokens(o, i, i + most), hopper) for i in range(0, len(o.x), most)]
    return Results(*map(torch.cat, zip(*pieces, strict=True)))


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.emulated_later
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 5, 8, 9, 33])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_bits_are_those_of_the_separate_ops(
    device: str, dtype: torch.dtype, num_tokens: int, n: int, k: int, with_bias: bool
) -> None:
    o = operands(num_tokens, n, k, dtype, device, with_bias)
    assert_same_results(fused(o), separate(o))


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.emulated_later
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "n", "k"),
    [(1, 7, 40_008), (3, 7, 9000), (9, 5, 4361), (9, 7, 4360), (1, 8195, 24), (5, 8193, 8)],
)
def test_tokens_longer_than_shared_memory_and_more_rows_than_the_gpu_holds(
    device: str, dtype: torch.dtype, num_tokens: int, n: int, k: int
) -> None:
    o = operands(num_tokens, n, k, dtype, device)
    assert_same_results(fused(o), separate(o))


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.emulated_later
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 12, 21, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(7, 61), (100, 577), *ALIGNED])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_results_are_near_the_float64_reference(
    device: str, dtype: torch.dtype, num_tokens: int, n: int, k: int, with_bias: bool, hopper: bool
) -> None:
    o = operands(num_tokens, n, k, dtype, device, with_bias)
    for actual, expected in zip(fused(o, hopper), exact(o), strict=True):
        assert_close(actual, expected, slack=2)


@pytest.mark.emulated_later
@pytest.mark.parametrize("k", [8, 72, 104, 577])
def test_widths_that_no_fast_kernel_takes_have_the_portable_bits(device: str, k: int) -> None:
    o = operands(9, 40, k, torch.bfloat16, device)
    assert_same_results(fused(o, hopper=True), fused(o, hopper=False))


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.emulated_later
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(33, 61), *ALIGNED])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_token_has_the_same_bits_in_every_batch_and_every_run(
    device: str, dtype: torch.dtype, n: int, k: int, hopper: bool
) -> None:
    o = operands(64, n, k, dtype, device)
    together = fused(o, hopper)
    for size in (1, 2, 3, 5, 9, 33):
        assert_same_results(in_groups(o, size, hopper), together)
    strangers = torch.where(torch.arange(64, device=device)[:, None] == 9, o.x, -3 * o.x.flip(0))
    for one, other in zip(fused(o._replace(x=strangers), hopper), together, strict=True):
        assert_same_bits(one[9], other[9])


@pytest.mark.uneven
@pytest.mark.emulated_later
@pytest.mark.parametrize(("n", "k"), [(8, 1088), *GROUPED])
def test_any_number_of_tokens_has_the_bits_of_each_alone(device: str, n: int, k: int) -> None:
    o = operands(64, n, k, torch.bfloat16, device)
    alone = in_groups(o, 1)
    for num_tokens in range(2, 65):
        few = fused(some_tokens(o, 0, num_tokens), hopper=True)
        assert_same_results(few, Results(*(one[:num_tokens] for one in alone)))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(8192, 3072), (8448, 4096)])
def test_blocks_with_room_for_one_stage_of_weights_have_the_same_bits(n: int, k: int) -> None:
    """On 132 sms, of 17 to 32 tokens; they run the kernels for larger blocks."""
    o = operands(32, n, k, torch.bfloat16, "cuda")
    assert_same_results(fused(o, hopper=True), in_groups(o, 8))


@pytest.mark.emulated_later(k=(17408,))
@pytest.mark.parametrize("k", [16448, 17408])
def test_more_columns_than_a_norm_takes_where_a_residual_is_added(device: str, k: int) -> None:
    """Qwen3-14B's down projection has 17,408: wider than any that is normalized."""
    o = operands(33, 24, k, torch.bfloat16, device)

    def added(num_tokens: int) -> Tensor:
        residual = o.residual[:num_tokens].clone()
        ops.linear_residual_(residual, o.x[:num_tokens], o.weight, o.bias, hopper=True)
        return residual

    noted = fallbacks()
    together = added(33)
    expected = o.residual.double()
    reference.linear_residual_(expected, o.x.double(), o.weight.double(), o.bias.double())
    assert_close(together, expected, slack=2)
    for num_tokens in (1, 9, 17):
        assert_same_bits(added(num_tokens), together[:num_tokens])
    assert fallbacks() == noted  # where Hopper kernels run, none gave way to a portable one
    assert _C.plan_linear(_C.Gpu(9, 0), "norm_linear_into", "bfloat16", 1, 24, k)[0] == "tile"


def check_near_and_the_same_in_batches(o: Operands, batches: tuple[int, ...]) -> None:
    together = fused(o, hopper=True)
    for one, other in zip(together, exact(o), strict=True):
        assert_close(one, other, slack=2)
    for num_tokens in batches:
        alone = fused(some_tokens(o, 0, num_tokens), hopper=True)
        assert_same_results(alone, Results(*(one[:num_tokens] for one in together)))


@pytest.mark.emulated_later
@pytest.mark.parametrize("n", [8, 40])
def test_few_tiles_of_many_columns(device: str, n: int) -> None:
    """Beyond 2,048 columns up to 8 tokens have the same kernel whether a block's tiles are few
    or many.
    """
    check_near_and_the_same_in_batches(operands(9, n, 2112, torch.bfloat16, device), (1, 2, 5, 8))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(9504, 64), (17000, 192)])
def test_more_tiles_than_a_pass_takes(n: int, k: int) -> None:
    """On 132 sms, two passes and three over the tokens where a residual is added; SwiGLU takes
    one and two.
    """
    check_near_and_the_same_in_batches(operands(9, n, k, torch.bfloat16, "cuda"), (1, 8))


@pytest.mark.uneven
@pytest.mark.six_sms
@pytest.mark.emulated_later
@pytest.mark.parametrize("num_tokens", [1, 9, 32, 64])
def test_what_is_not_finite_has_the_same_bits_in_every_batch(device: str, num_tokens: int) -> None:
    """Not even beside columns that another block multiplies does it meet a zero."""
    o = operands(64, 8, 1088, torch.bfloat16, device)
    for column in (0, 543, 544, 600, 1023, 1024, 1087):
        o.x[column % 7, column] = torch.inf
    first = fused(some_tokens(o, 0, num_tokens), hopper=True)
    for one, other in zip(first, fused(o, hopper=True), strict=True):
        torch.testing.assert_close(one, other[:num_tokens], rtol=0, atol=0, equal_nan=True)


@pytest.mark.uneven
@pytest.mark.six_sms(n=(120,))
@pytest.mark.emulated_later(n=(80, 120, 264), num_tokens=(64,))
@pytest.mark.parametrize("num_tokens", [32, 33, 64])
@pytest.mark.parametrize(("n", "k"), GROUPED)
def test_counts_around_the_groups_of_tokens(device: str, num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, torch.bfloat16, device)
    whole = fused(o, hopper=True)
    within = [count for count in (0, 1, 15, 16, 17, 31, 32, 33, 48, 63, 64) if count <= num_tokens]
    for counts in (-1, *within, 99):
        assert_leading_tokens_only(
            o, ints([counts], device), min(max(counts, 0), num_tokens), whole
        )


@pytest.mark.uneven
@pytest.mark.parametrize("num_tokens", [65, 100, 130])
@pytest.mark.parametrize(("n", "k"), [(72, 320), (8, 1088)])
def test_more_tokens_than_a_launch_takes_have_the_bits_of_fewer_at_any_counts(
    device: str, num_tokens: int, n: int, k: int
) -> None:
    o = operands(num_tokens, n, k, torch.bfloat16, device)
    fewer = in_groups(o, 33)
    assert_same_results(fused(o, hopper=True), fewer)
    for counts in (-(2**31), 0, 37, 64, 65, 99, 128, 129, 2**31 - 1):
        assert_leading_tokens_only(
            o, ints([counts], device), min(max(counts, 0), num_tokens), fewer
        )


def workspace_for(o: Operands) -> Tensor:
    """Of NaN: nothing that was there before is used."""
    words = ops.linear_workspace_words(*o.x.shape)
    return torch.full((words,), torch.nan, device=o.x.device)


# Tiles that end within the weight and beyond it; an n of odd columns; few columns of a K block and
# none; two parts of the columns, of which the second is short.
MANY_TOKENS = [(72, 320), (21, 192), (264, 576), (8, 1088), (120, 1088), (200, 64)]


@pytest.mark.uneven
@pytest.mark.emulated_later
@pytest.mark.parametrize("num_tokens", [65, 128, 129, 200, 300])
@pytest.mark.parametrize(("n", "k"), MANY_TOKENS)
def test_many_tokens_have_the_bits_of_few(device: str, num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, torch.bfloat16, device, with_bias=n % 16 != 0)
    few = in_groups(o)
    assert_same_results(fused(o, hopper=True, workspace=workspace_for(o)), few)
    for one, other in zip(few, exact(o), strict=True):
        assert_close(one, other, slack=2)


@pytest.mark.uneven
@pytest.mark.emulated_later(n=(40,))
@pytest.mark.parametrize("num_tokens", [129, 300])
@pytest.mark.parametrize(("n", "k"), [(72, 320), (40, 1088)])
def test_many_tokens_at_any_counts(device: str, num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, torch.bfloat16, device)
    few = in_groups(o)
    for counts in (-(2**31), 0, 1, 64, 127, 128, 129, 257, 2**31 - 1):
        assert_leading_tokens_only(
            o,
            ints([counts], device),
            min(max(counts, 0), num_tokens),
            few,
            workspace=workspace_for(o),
        )


@pytest.mark.parametrize("gap", [5, 16])
def test_many_strided_tokens_leave_the_gaps_alone(device: str, gap: int) -> None:
    """Where tokens are not aligned (5), the Hopper kernels do not run, or write value by value."""
    o = operands(130, 72, 192, torch.bfloat16, device)
    workspace = workspace_for(o)
    few = in_groups(o)
    wide_out = fused(o, hopper=True, gap=gap, workspace=workspace)
    assert_same_bits(wide_out.norm_linear, few.norm_linear)
    assert_same_bits(wide_out.norm_swiglu, few.norm_swiglu)
    wide_x = fused(
        o._replace(x=in_wider_tokens(o.x, gap)), hopper=True, gap=gap, workspace=workspace
    )
    for one, other in zip(wide_x, exact(o), strict=True):
        assert_close(one, other, slack=2)
        assert int(one.as_strided((130, 72 + gap), (72 + gap, 1), 0).isnan().sum()) == 130 * gap


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [65, 128, 129, 200, 300, 512, 1024, 2048])
@pytest.mark.parametrize(
    ("n", "k"), [(1024, 2048), (3072, 1024), (2048, 2048), (2560, 4096), (6144, 2560), (4096, 4096)]
)
def test_many_tokens_of_the_models_have_the_bits_of_few(num_tokens: int, n: int, k: int) -> None:
    o = operands(num_tokens, n, k, torch.bfloat16, "cuda")
    assert_same_results(fused(o, hopper=True, workspace=workspace_for(o)), in_groups(o))


@pytest.mark.uneven
@pytest.mark.six_sms
@pytest.mark.emulated_later
@pytest.mark.parametrize("num_tokens", [65, 130])
def test_many_tokens_that_are_not_finite(device: str, num_tokens: int) -> None:
    o = operands(num_tokens, 24, 1088, torch.bfloat16, device)
    for column in (0, 543, 544, 600, 1023, 1024, 1087):
        o.x[column % 7, column] = torch.inf
    many = fused(o, hopper=True, workspace=workspace_for(o))
    for one, other in zip(many, in_groups(o), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gap", [5, 16])
def test_strided_tokens_of_several_launches_leave_the_gaps_alone(device: str, gap: int) -> None:
    o = operands(130, 72, 192, torch.bfloat16, device)
    actual = fused(o._replace(x=in_wider_tokens(o.x, gap)), hopper=True, gap=gap)
    for one, other in zip(actual, exact(o), strict=True):
        assert_close(one, other, slack=2)
        assert int(one.as_strided((130, 72 + gap), (72 + gap, 1), 0).isnan().sum()) == 130 * gap


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [-1, 0, 1, 4, 5, 99])
@pytest.mark.parametrize("hopper", [False, True])
def test_counts_computes_the_leading_tokens_only(
    device: str, dtype: torch.dtype, counts: int, hopper: bool
) -> None:
    o = operands(5, 64, 128, dtype, device)
    assert_leading_tokens_only(
        o, ints([counts, 7], device), min(max(counts, 0), 5), fused(o, hopper), hopper
    )


@pytest.mark.emulated_once(dtype=NOT_BFLOAT16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(21, 40), (21, 192), (72, 192)])
@pytest.mark.parametrize("gap", [5, 16])  # 16: tokens stay aligned
@pytest.mark.parametrize("hopper", [False, True])
def test_strided_tokens_leave_the_gaps_alone(
    device: str, dtype: torch.dtype, n: int, k: int, gap: int, hopper: bool
) -> None:
    o = operands(9, n, k, dtype, device)
    strided = o._replace(x=in_wider_tokens(o.x, gap), weight=in_wider_tokens(o.weight, gap))
    actual, dense = fused(strided, hopper, gap=gap), fused(o)
    for one, other in zip(actual, dense, strict=True):
        assert_close(one, other.double(), slack=2)
        buffer = one.as_strided((9, n + gap), (n + gap, 1), 0)
        assert int(buffer.isnan().sum()) == 9 * gap
    if not hopper:
        assert_same_results(actual, dense)


@pytest.mark.emulated_later
@pytest.mark.parametrize("counts", [None, 2])
def test_the_reference_writes_what_the_ops_write(device: str, counts: int | None) -> None:
    o = operands(3, 10, 24, torch.float32, device)
    num_tokens = None if counts is None else ints([counts], device)
    expected = Results(
        poisoned(3, 10, dtype=torch.float32, device=device),
        o.residual.clone(),
        torch.full_like(o.residual, torch.nan),
    )
    reference.norm_linear_into(
        expected.norm_linear, o.x, o.norm, EPS, o.weight, o.bias, num_tokens, hopper=True
    )
    reference.linear_residual_(
        expected.linear_residual, o.x, o.weight, o.bias, num_tokens, hopper=True
    )
    reference.norm_swiglu_into(
        expected.norm_swiglu, o.x, o.norm, EPS, o.gate_up, o.gate_up_bias, num_tokens, hopper=True
    )
    for one, other in zip(fused(o, counts=num_tokens), expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.emulated_later
@pytest.mark.parametrize("hopper", [False, True])
def test_the_functionals_have_the_bits_of_the_ops(device: str, hopper: bool) -> None:
    o = operands(3, 10, 24, torch.float32, device)
    into = fused(o, hopper)
    assert_same_bits(
        ops.norm_linear(o.x, o.norm, EPS, o.weight, o.bias, hopper=hopper), into.norm_linear
    )
    assert_same_bits(
        ops.norm_swiglu(o.x, o.norm, EPS, o.gate_up, o.gate_up_bias, hopper=hopper),
        into.norm_swiglu,
    )


@pytest.mark.emulated_later
def test_large_values_do_not_overflow_float16(device: str) -> None:
    """The normalized tokens are near 1 however large x is."""
    o = operands(2, 16, 64, torch.float16, device)
    o = o._replace(x=torch.full_like(o.x, 6e4), norm=torch.ones_like(o.norm))
    ones = o._replace(x=torch.ones_like(o.x))
    assert_close(fused(o).norm_linear, exact(ones).norm_linear, slack=2)
    assert_close(fused(o).norm_swiglu, exact(ones).norm_swiglu, slack=2)


@pytest.mark.emulated_once
@pytest.mark.emulated_later
def test_cpu_results_depend_neither_on_the_number_of_threads_nor_on_fast() -> None:
    o = operands(5, 900, 576, torch.bfloat16, "cpu")
    before = num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            set_num_threads(threads)
            results += [fused(o, hopper=False), fused(o, hopper=True)]
    finally:
        set_num_threads(before)
    for result in results[1:]:
        assert_same_results(result, results[0])
