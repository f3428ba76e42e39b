"""The Hopper linears of a batch for weights in fp8, int4 and int8: near the float64 reference, with
the bits of those for a dense weight of the same numbers, whatever other tokens are.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from photon_ext import _C, hopper_runs, ops
from photon_ext._library import fallbacks
from photon_ext.dequantize import dequantized
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.weight import Weight
from tests.ops import test_batch_linear as dense
from tests.ops.numeric import assert_close, assert_same_bits, ints, poisoned, randn
from tests.ops.stored import Kind, in_wider_rows, random_weight
from tests.ops.test_narrow_stored import BF16, EPS, KINDS

# (n, k): one 8-row tile; rows and parts of the columns that end within a tile and a ring; more
# steps than the rings have stages; several tiles.
SHAPES = [(8, 512), (72, 1536), (40, 4608), (264, 1024)]
# All sizes of tiles that four models have.
MODELS = [(6144, 2560), (2560, 4096), (9728, 2560), (2560, 9728), (12288, 4096), (4096, 12288)]
MODELS += [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (8192, 2048), (2048, 2048)]


class Operands(NamedTuple):
    """What the three ops take, for n outputs of k inputs."""

    x: Tensor | Fp8Tokens  # [tokens, k]
    weight: Weight  # [2n, k]: gate, then up
    half: Weight  # its first n rows
    bias: Tensor  # [2n]
    residual: Tensor  # [tokens, n]
    norm: Tensor  # [n]


def operands(kind: Kind, tokens: int, n: int, k: int, device: str) -> Operands:
    x, bias, residual, norm = (
        randn(*shape, dtype=BF16, device=device, seed=seed)
        for seed, shape in enumerate([(tokens, k), (2 * n,), (tokens, n), (n,)])
    )
    weight = random_weight(kind, 2 * n, k, device)
    half = random_weight(kind, n, k, device, seed=2)
    return Operands(x, weight, half, bias, residual, norm)


def run(o: Operands, counts: Tensor | None = None) -> dense.Results:
    """The three ops, into memory that tells what was not written."""
    (tokens, n), device = o.residual.shape, str(o.residual.device)
    out, act, normed = (poisoned(tokens, n, dtype=BF16, device=device) for _ in range(3))
    residual, bias = o.residual.clone(), o.bias[:n]
    words = ops.linear_norm_workspace_words(tokens, n)
    workspace = torch.full((words,), torch.nan, device=device)
    ops.linear_into(out, o.x, o.half, bias, counts, True)
    ops.swiglu_into(act, o.x, o.weight, o.bias, counts, True)
    last = o.norm, EPS, bias, counts, True
    ops.linear_norm_into(normed, residual, o.x, o.half, *last, workspace=workspace)
    if o.residual.is_cuda:
        torch.cuda.synchronize()  # compute-sanitizer keeps 0.7 GB of each launch until then
    return dense.Results(out, act, residual, normed)


def of_numbers(o: Operands) -> Operands:
    """The same with dense weights of the numbers that kernels make of these."""
    weight, half = (Weight(dequantized(one).to(BF16)) for one in (o.weight, o.half))
    return o._replace(weight=weight, half=half)


def exact(o: Operands) -> dense.Results:
    """In float64, of the numbers that kernels make of the weights."""
    numbers = of_numbers(o)

    def of(weight: Tensor) -> dense.Results:
        return dense.exact(dense.Operands(o.x, weight, o.bias, o.residual, o.norm))

    single = of(numbers.half.data.repeat(2, 1))
    return single._replace(swiglu=of(numbers.weight.data).swiglu)


def parts_are_those_of_a_dense_weight(kind: Kind, k: int) -> bool:
    """Parts of the columns consist of 128 bytes of a row."""
    return k % (4 * 128 * kind.format.columns // kind.format.bytes) == 0


@pytest.mark.emulated_later(k=(1536, 4608), tokens=(130,))
@pytest.mark.parametrize("tokens", [1, 33, 64, 100, 130])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_those_of_a_dense_weight_of_the_numbers(
    device: str, kind: Kind, n: int, k: int, tokens: int
) -> None:
    o, noted = operands(kind, tokens, n, k, device), fallbacks()
    actual = run(o)
    assert fallbacks() == noted  # where Hopper kernels run, none gave way to a portable one
    dense.assert_near(actual, exact(o))
    if not hopper_runs():
        return  # the portable kernels multiply by numbers that are not rounded
    expected = run(of_numbers(o))
    assert_same_bits(actual.swiglu, expected.swiglu)
    if parts_are_those_of_a_dense_weight(kind, k):
        dense.assert_same(actual, expected)


@pytest.mark.parametrize("tokens", [33, 65, 130])
@pytest.mark.parametrize(
    ("kind", "k"), [(KINDS[0], 128), (KINDS[2], 128), (KINDS[3], 256)], ids=str
)
def test_columns_of_128_bytes_have_no_parts(device: str, kind: Kind, k: int, tokens: int) -> None:
    o, noted = operands(kind, tokens, 72, k, device), fallbacks()
    dense.assert_near(run(o), exact(o))
    assert fallbacks() == noted


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=str)
def test_one_group_decodes_tiles_of_128_tokens_by_more_than_128_rows(
    device: str, kind: Kind
) -> None:
    """SwiGLU alone has such a tile here."""
    o = operands(kind, 65, 8512, 256, device)
    (out, expected) = (torch.empty(65, 8512, dtype=BF16, device=device) for _ in range(2))
    ops.swiglu_into(out, o.x, o.weight, o.bias, hopper=True)
    ops.swiglu_into(expected, o.x, of_numbers(o).weight, o.bias, hopper=True)
    if hopper_runs():
        assert_same_bits(out, expected)
    else:
        assert_close(out, expected, slack=2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [33, 64, 100, 128, 192, 256])
@pytest.mark.parametrize(("n", "k"), MODELS)
@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=str)
def test_shapes_of_models(kind: Kind, tokens: int, n: int, k: int) -> None:
    o = operands(kind, tokens, n, k, "cuda")
    dense.assert_near(run(o), exact(o))


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[7]], ids=str)
@pytest.mark.parametrize("tokens", [64, 130])
def test_a_token_has_the_same_bits_whatever_others_are(
    device: str, kind: Kind, tokens: int
) -> None:
    o = operands(kind, tokens, 72, 512, device)
    first, others = run(o), dense.among_strangers(o.x, o.residual)
    dense.assert_same_every_ninth(first, run(o._replace(**others)))
    dense.assert_same(run(o), first)


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=str)
@pytest.mark.parametrize("tokens", [64, 130])
def test_only_counted_tokens_are_computed(device: str, kind: Kind, tokens: int) -> None:
    o = operands(kind, tokens, 72, 512, device)
    whole = run(o)
    for counts in (-1, 0, 1, 63, 65, 129, 999):
        done = min(max(counts, 0), tokens)
        actual = run(o, ints([counts], device))
        for one, other in zip(actual, whole, strict=True):
            assert_same_bits(one[:done], other[:done])
        for one in (actual.linear, actual.swiglu, actual.normed):
            assert one[done:].isnan().all()
        assert_same_bits(actual.residual[done:], o.residual[done:])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_rows_may_lie_apart(device: str, kind: Kind) -> None:
    o = operands(kind, 65, 40, 512, device)
    dense.assert_same(run(o._replace(half=in_wider_rows(o.half, 48))), run(o))


@pytest.mark.parametrize("op", ["linear_into", "swiglu_into", "linear_norm_into"])
def test_a_batchs_linears_read_fp8_int4_and_int8(op: str) -> None:
    given = {"op": op, "dtype": "bfloat16", "tokens": 40, "n": 64, "k": 512}
    fp8 = {"format": "fp8"}
    int4 = {"format": "int4", "scale_columns": 128, "scale_dtype": "float16"}
    int8 = {"format": "int8", "scale_columns": 16, "scale_dtype": "float16"}
    for stored in (fp8, int4, int4 | {"scale_columns": 32, "offsets": True}, int8):
        assert _C.plan_linear(_C.Gpu(9, 0), **(given | stored)) == ("batch_stored", None)
    kernel, why = _C.plan_linear(_C.Gpu(9, 0), **(given | {"format": "q4_0"}))
    assert (kernel, why) == ("tile", "of weights of fewer bits they read fp8, int4 and int8")
