"""The linears of a batch of tokens in fp8 by weights in fp8, and the op that makes such tokens:
near the float64 reference, whatever other tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from photon_ext import _C, hopper_runs, ops, reference
from photon_ext._library import fallbacks
from photon_ext.dequantize import dequantized
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.weight_format import WeightFormat
from tests.ops import test_batch_linear as dense
from tests.ops import test_batch_stored as stored
from tests.ops.numeric import DTYPES, assert_same_bits, in_wider_tokens, ints, poisoned, randn
from tests.ops.stored import FP8, Kind, in_wider_rows
from tests.ops.test_narrow_stored import BF16, EPS

ROWS, BLOCKS = Kind(WeightFormat.FP8), Kind(WeightFormat.FP8, 128, 128)
# (n, k): one K block and one 8-row tile; rows that end within a tile and within a block of scales;
# parts of the columns that are unequal; more K blocks than the rings have stages.
SHAPES = [(8, 128), (72, 640), (264, 1152), (40, 4480)]
# Tiles of every size, of 64 and of 128 tokens; those of SwiGLU end within blocks of scales.
TILES = [(6144, 256), (4096, 256), (9728, 128), (2560, 256), (8512, 128), (12288, 128)]


def empty_tokens(tokens: int, k: int, device: str) -> Fp8Tokens:
    """That tell what was not written."""
    data = torch.full((tokens, k), 0x7F, dtype=torch.uint8, device=device).view(FP8)
    return Fp8Tokens(data, poisoned(tokens, dtype=torch.float32, device=device))


def quantized(x: Tensor) -> Fp8Tokens:
    out = empty_tokens(*x.shape, str(x.device))
    ops.quantize_fp8_into(out, x)
    return out


def operands(kind: Kind, tokens: int, n: int, k: int, device: str) -> stored.Operands:
    o = stored.operands(kind, tokens, n, k, device)
    assert isinstance(o.x, Tensor)
    return o._replace(x=quantized(o.x))


def exact(o: stored.Operands) -> dense.Results:
    """In float64."""
    assert isinstance(o.x, Fp8Tokens)
    x = o.x.data.double() * o.x.scale.double()[:, None]

    def of(weight: Tensor) -> dense.Results:
        return dense.exact(dense.Operands(x, weight, o.bias, o.residual, o.norm))

    single = of(dequantized(o.half).repeat(2, 1))
    return single._replace(swiglu=of(dequantized(o.weight)).swiglu)


@pytest.mark.emulated_later(k=(1152, 4480), tokens=(130,))
@pytest.mark.parametrize("tokens", [1, 33, 64, 100, 130])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", [ROWS, BLOCKS], ids=str)
def test_results_are_near_the_float64_reference(
    device: str, kind: Kind, n: int, k: int, tokens: int
) -> None:
    o, noted = operands(kind, tokens, n, k, device), fallbacks()
    dense.assert_near(stored.run(o), exact(o))
    assert fallbacks() == noted


@pytest.mark.parametrize("tokens", [64, 65, 129])
@pytest.mark.parametrize(("n", "k"), TILES)
@pytest.mark.parametrize("kind", [ROWS, BLOCKS], ids=str)
@pytest.mark.emulated_later(kind=(ROWS,), n=(6144, 4096, 2560, 12288))
def test_tiles_of_every_size(device: str, kind: Kind, n: int, k: int, tokens: int) -> None:
    o = operands(kind, tokens, n, k, device)
    dense.assert_near(stored.run(o), exact(o))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 64, 100, 128, 192, 256, 300])
@pytest.mark.parametrize(("n", "k"), stored.MODELS)
@pytest.mark.parametrize("kind", [ROWS, BLOCKS], ids=str)
def test_shapes_of_models(kind: Kind, tokens: int, n: int, k: int) -> None:
    o = operands(kind, tokens, n, k, "cuda")
    dense.assert_near(stored.run(o), exact(o))


@pytest.mark.parametrize("kind", [ROWS, BLOCKS], ids=str)
@pytest.mark.parametrize("tokens", [64, 130])
def test_a_token_has_the_same_bits_whatever_others_are(
    device: str, kind: Kind, tokens: int
) -> None:
    plain = stored.operands(kind, tokens, 72, 512, device)
    assert isinstance(plain.x, Tensor)
    others = dense.among_strangers(plain.x, plain.residual)
    o = plain._replace(x=quantized(plain.x))
    strangers = plain._replace(x=quantized(others["x"]), residual=others["residual"])
    first = stored.run(o)
    dense.assert_same_every_ninth(first, stored.run(strangers))
    dense.assert_same(stored.run(o), first)


@pytest.mark.parametrize("tokens", [64, 130])
def test_only_counted_tokens_are_computed(device: str, tokens: int) -> None:
    o = operands(BLOCKS, tokens, 72, 512, device)
    whole = stored.run(o)
    for counts in (-1, 0, 1, 63, 65, 129, 999):
        done = min(max(counts, 0), tokens)
        actual = stored.run(o, ints([counts], device))
        for one, other in zip(actual, whole, strict=True):
            assert_same_bits(one[:done], other[:done])
        for one in (actual.linear, actual.swiglu, actual.normed):
            assert one[done:].isnan().all()
        assert_same_bits(actual.residual[done:], o.residual[done:])


def test_rows_and_tokens_may_lie_apart(device: str) -> None:
    o = operands(ROWS, 65, 40, 512, device)
    assert isinstance(o.x, Fp8Tokens)
    wider = torch.zeros(65, 528, dtype=torch.uint8, device=device).view(FP8)[:, :512]
    wider.view(torch.uint8).copy_(o.x.data.view(torch.uint8))
    apart = o._replace(half=in_wider_rows(o.half, 48), x=o.x._replace(data=wider))
    dense.assert_same(stored.run(apart), stored.run(o))


def test_a_token_that_is_no_number_leaves_others_alone(device: str) -> None:
    plain = stored.operands(BLOCKS, 40, 72, 512, device)
    assert isinstance(plain.x, Tensor)
    whole = stored.run(plain._replace(x=quantized(plain.x)))
    plain.x[3, 7], plain.x[11, 500] = torch.nan, torch.inf
    actual = stored.run(plain._replace(x=quantized(plain.x)))
    damaged = torch.tensor([3, 11], device=device)
    others = torch.tensor([i for i in range(40) if i not in (3, 11)], device=device)
    for one, other in zip(actual, whole, strict=True):
        assert not one[damaged].isfinite().any()
        assert_same_bits(one[others], other[others])


@pytest.mark.parametrize("kind", [ROWS, BLOCKS], ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(40, 72), (130, 264), (33, 8200)])
def test_what_is_normalized_may_be_left_in_fp8(
    device: str, kind: Kind, tokens: int, n: int
) -> None:
    """With the bits that quantize_fp8_into gives it."""
    o = operands(kind, tokens, n, 256, device)
    expected = stored.run(o)
    for counts in (tokens, tokens - 5):
        residual, out = o.residual.clone(), empty_tokens(tokens, n, device)
        workspace = torch.empty(ops.linear_norm_workspace_words(tokens, n), device=device)
        last = o.norm, EPS, o.bias[:n], ints([counts], device), True
        ops.linear_norm_into(out, residual, o.x, o.half, *last, workspace=workspace)
        assert_same_bits(residual[:counts], expected.residual[:counts])
        whole = quantized(expected.normed)
        assert_same_bits(out.scale[:counts], whole.scale[:counts])
        assert out.scale[counts:].isnan().all()
        same = out.data.view(torch.uint8)[:counts] == whole.data.view(torch.uint8)[:counts]
        assert same.all()


# --- quantize_fp8_into ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 24, 127, 640, 4096, 20000])
def test_tokens_in_fp8_have_the_bits_of_the_reference(
    device: str, dtype: torch.dtype, k: int
) -> None:
    x = randn(5, k, dtype=dtype, device=device)
    x[1] = 0
    x[2] *= 1e-4 if dtype == torch.float16 else 1e-30
    x[3, 0] = -3e4
    actual, expected = quantized(in_wider_tokens(x, 3)), empty_tokens(5, k, device)
    reference.quantize_fp8_into(expected, x)
    assert_same_bits(actual.scale, expected.scale)
    assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("counts", [-1, 0, 2, 9])
def test_only_counted_tokens_are_written(device: str, counts: int) -> None:
    x, out = randn(4, 256, dtype=BF16, device=device), empty_tokens(4, 256, device)
    ops.quantize_fp8_into(out, x, ints([counts], device))
    done, whole = min(max(counts, 0), 4), quantized(x)
    assert torch.equal(out.data[:done].view(torch.uint8), whole.data[:done].view(torch.uint8))
    assert_same_bits(out.scale[:done], whole.scale[:done])
    assert out.scale[done:].isnan().all()
    assert (out.data[done:].view(torch.uint8) == 0x7F).all()


# --- who reads them -------------------------------------------------------------------------------


def test_kernels_that_do_not_read_fp8_tokens_say_so(device: str) -> None:
    o = operands(Kind(WeightFormat.FP8, 1, 128), 40, 72, 512, device)
    if hopper_runs():
        with pytest.raises(RuntimeError, match=r"x is float8_e4m3fn, which no kernel reads here"):
            stored.run(o)
    else:
        dense.assert_near(stored.run(o), exact(o))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda o: o._replace(x=o.x.data), r"x_scale is None, expected float32 \[tokens of x\]"),
        (lambda o: o._replace(x=o.x._replace(data=o.x.data.float())), "x has dtype float32, expec"),
        (lambda o: o._replace(x=o.x._replace(scale=o.x.scale[1:])), r"x_scale has shape \[39\]"),
        (lambda o: o._replace(x=o.x._replace(scale=o.x.scale.half())), "x_scale has dtype float16"),
    ],
)
def test_tokens_that_are_none_are_refused(
    device: str, change: Callable[[Any], stored.Operands], told: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^linear_into: {told}"):
        stored.run(change(operands(ROWS, 40, 72, 512, device)))


def test_what_is_quantized_goes_into_tokens_in_fp8() -> None:
    with pytest.raises(TypeError, match=r"out is a Tensor; give Fp8Tokens\(data, scale\)"):
        ops.quantize_fp8_into(torch.zeros(2, 8), torch.ones(2, 8))  # type: ignore[arg-type]


def test_outputs_in_fp8_are_of_tokens_in_fp8(device: str) -> None:
    o = stored.operands(ROWS, 40, 72, 512, device)
    workspace = torch.empty(ops.linear_norm_workspace_words(40, 72), device=device)
    with pytest.raises(RuntimeError, match=r"out_scale is a tensor, expected None, because x is"):
        ops.linear_norm_into(
            empty_tokens(40, 72, device),
            o.residual,
            o.x,
            o.half,
            o.norm,
            EPS,
            hopper=True,
            workspace=workspace,
        )


def test_scales_of_an_output_in_fp8_lie_apart_from_the_workspace(device: str) -> None:
    o = operands(ROWS, 40, 72, 512, device)
    workspace = torch.empty(ops.linear_norm_workspace_words(40, 72), device=device)
    out = empty_tokens(40, 72, device)._replace(scale=workspace[:40])
    last = o.norm, EPS, None, None, True
    with pytest.raises(RuntimeError, match="workspace shares memory with out_scale"):
        ops.linear_norm_into(out, o.residual, o.x, o.half, *last, workspace=workspace)


def test_other_linears_name_the_dtypes_that_they_take(device: str) -> None:
    o = operands(ROWS, 40, 72, 512, device)
    assert isinstance(o.x, Fp8Tokens)
    with pytest.raises(RuntimeError, match="x has dtype float8_e4m3fn, expected float32, float16"):
        ops.linear_residual_(o.residual, o.x.data, o.half)


@pytest.mark.parametrize("op", ["linear_into", "swiglu_into", "linear_norm_into"])
def test_the_plan_names_the_kernel_or_the_reason(op: str) -> None:
    given = {"op": op, "dtype": "bfloat16", "tokens": 40, "n": 64, "k": 512, "fp8_tokens": True}
    of_rows = {"format": "fp8", "scale_columns": 512}
    of_blocks = {"format": "fp8", "scale_columns": 128, "scale_rows": 128}
    for weight in (of_rows, of_blocks):
        assert _C.plan_linear(_C.Gpu(9, 0), **(given | weight)) == ("batch_fp8", None)  # type: ignore[arg-type]
    for weight, reason in (
        ({"format": "fp8", "scale_columns": 128}, "neither a scale a row nor one a block"),
        ({"format": "dense"}, "the weight is not"),
        (of_rows | {"dtype": "float16"}, "not bfloat16"),
    ):
        kernel, why = _C.plan_linear(_C.Gpu(9, 0), **(given | weight))  # type: ignore[arg-type]
        assert kernel == "tile"
        assert why is not None
        assert reason in why
