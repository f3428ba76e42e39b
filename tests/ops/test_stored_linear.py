"""Linears and embeddings of weights of fewer bits: the numbers of each format, near the float64
reference, the same bits alone and in a batch and in every op, and clear errors where the parts of a
weight do not belong together.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from photon_ext import ops, reference
from photon_ext.dequantize import dequantized
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    ints,
    poisoned,
    randn,
)
from tests.ops.stored import FP8, HALVES, KINDS, Kind, in_wider_rows, random_weight

EPS = 1e-5
ROWS = Kind(WeightFormat.FP8)
# One of each way to read a row: e4m3, scales beside the numbers, and blocks of both sizes.
SOME = [KINDS[1], KINDS[3], KINDS[7], Kind(WeightFormat.Q4_1), Kind(WeightFormat.Q6_K)]


def columns_of(kind: Kind, blocks: int) -> int:
    """So many blocks of 256 columns; of fp8 some more, which are no whole pack."""
    return 256 * blocks + (65 if kind.format is WeightFormat.FP8 else 0)


@pytest.mark.parametrize("form", HALVES, ids=str)
def test_blocks_have_the_numbers_that_gguf_reads_in_them(form: WeightFormat) -> None:
    """Of any bytes whose scales are finite."""
    weight = random_weight(Kind(form), 9, 768)
    theirs = quants.dequantize(weight.data.numpy(), GGMLQuantizationType[form.name])
    assert weight.k == 768
    assert torch.equal(dequantized(weight), torch.from_numpy(np.array(theirs)))


def test_int4_is_two_codes_a_byte_less_their_zero_and_scaled() -> None:
    """The even column in the low bits."""
    data = torch.arange(64, dtype=torch.uint8).view(2, 32)
    scale = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    zero = torch.tensor([[0, 16], [7, 1]], dtype=torch.uint8)
    codes = torch.stack([data & 15, data >> 4], dim=-1).view(2, 2, 32)
    numbers = (codes.float() - zero[..., None]) * scale[..., None]
    weight = Weight(data, WeightFormat.INT4, scale, zero)
    assert torch.equal(dequantized(weight), numbers.view(2, 64))
    plain = dequantized(replace(weight, zero=None))
    assert torch.equal(plain, ((codes.float() - 8) * scale[..., None]).view(2, 64))
    offset = torch.tensor([[0.25, -3.0], [0.0, 5.0]])
    above = dequantized(replace(weight, scale=scale.half(), zero=offset.half()))
    assert torch.equal(above, (codes * scale[..., None] + offset[..., None]).view(2, 64))


def test_a_number_with_an_offset_is_rounded_once(device: str) -> None:
    """The product of code and scale, which has 15 bits, is not."""
    weight = random_weight(
        Kind(WeightFormat.INT4, 1, 32, torch.float16, offsets=True), 64, 256, device
    )
    out = poisoned(64, 256, dtype=torch.float32, device=device)
    ops.dequantize_into(out, weight)
    assert torch.equal(out, dequantized(weight))


def test_int8_is_a_code_a_byte_less_128_and_scaled() -> None:
    data = torch.arange(64, dtype=torch.uint8).view(2, 32) * 4
    scale = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    numbers = (data.view(2, 2, 16).float() - 128) * scale[..., None]
    assert torch.equal(dequantized(Weight(data, WeightFormat.INT8, scale)), numbers.view(2, 32))


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def each_scale(form: WeightFormat, device: str) -> tuple[Weight, Tensor]:
    """A row for each byte that a scale may be, of all sixteen e2m1 numbers in turn; and these."""
    pairs = torch.arange(16, dtype=torch.uint8)
    row = pairs[::2] | pairs[1::2] << 4
    data = row.repeat(256, form.bytes // 8).to(device)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].to(device)
    if form is WeightFormat.NVFP4:
        scale = scale.view(FP8)
    numbers = torch.tensor([*E2M1, *(-one for one in E2M1)], device=device)
    return Weight(data, form, scale), numbers.repeat(form.columns // 16)


def read_by_all(weight: Weight) -> list[Tensor]:
    """The numbers as a linear of one token, one of several, and dequantize_into read them."""
    unit = torch.eye(weight.k, device=weight.device)
    out = poisoned(weight.n, weight.k, dtype=torch.float32, device=str(weight.device))
    ops.dequantize_into(out, weight)
    alone = torch.cat([ops.linear(one[None], weight) for one in unit])
    return [out, alone.T, ops.linear(unit, weight).T]


def test_each_e2m1_number_and_each_e8m0_scale_is_read_exactly(device: str) -> None:
    """Subnormal ones included; what is too large for float32 and 2^128, a NaN, are infinite."""
    weight, numbers = each_scale(WeightFormat.MXFP4, device)
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    wanted = (powers.to(device)[:, None] * numbers).float()
    assert wanted[0, 1] == 2.0**-128
    assert torch.equal(dequantized(weight)[:255], wanted)
    assert bool(dequantized(weight)[255].isnan().all())
    out, *products = read_by_all(weight)
    assert torch.equal(out[:255], wanted)
    assert out[255].isnan().tolist() == (numbers == 0).tolist()
    assert bool(out[255][numbers != 0].isinf().all())
    for product in products:  # of infinity and 0 there is none
        assert torch.equal(product[:253], wanted[:253])


@pytest.mark.parametrize("divisor", [None, 1.0, 3.7, 2688.0])
def test_each_e4m3_scale_is_divided_before_it_multiplies(
    device: str, divisor: float | None
) -> None:
    """In float32; NaN is read as 480, as the docs say."""
    weight, numbers = each_scale(WeightFormat.NVFP4, device)
    if divisor is not None:
        weight = replace(weight, divisor=torch.full((256, 1), divisor, device=device))
    assert weight.scale is not None
    scale = weight.scale.float().cpu()
    assert scale.isnan().nonzero().tolist() == [[127, 0], [255, 0]]
    wanted = numbers * (scale / (divisor or 1)).to(device)
    finite = ~wanted.isnan().all(-1)
    assert torch.equal(dequantized(weight)[finite], wanted[finite])
    for found in read_by_all(weight):
        assert torch.equal(found[finite], wanted[finite])
        assert torch.equal(found[127], numbers * (torch.tensor(480.0) / (divisor or 1)).item())


def test_every_finite_e4m3_is_read_exactly(device: str) -> None:
    """By one token and by several; the others are read as 480, as the docs say."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)[:, None]
    values = codes.float()[:, 0]
    weight = Weight(codes, WeightFormat.FP8, torch.ones(256, 1, device=device))
    for tokens in (1, 5):
        out = ops.linear(torch.ones(tokens, 1, device=device), weight)[-1]
        finite = ~values.isnan()
        assert torch.equal(out[finite], values[finite])
        assert out[~finite].abs().tolist() == [480.0, 480.0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_is_read_as_the_reference_reads_it(device: str, kind: Kind) -> None:
    """By one token and by several: each column alone."""
    k = columns_of(kind, 1)
    weight = random_weight(kind, 3, k, device)
    numbers = dequantized(weight)
    assert torch.equal(ops.linear(torch.eye(k, device=device), weight).T, numbers)
    one = torch.eye(k, device=device)[[201]]
    assert torch.equal(ops.linear(one, weight)[0], numbers[:, 201])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_stored_linear_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, kind: Kind
) -> None:
    n, k = 130, columns_of(kind, 2)
    weight = random_weight(kind, n, k, device)
    x, bias = (randn(*shape, dtype=dtype, device=device) for shape in ((19, k), (n,)))
    out = poisoned(19, n, dtype=dtype, device=device)
    ops.linear_into(out, x, weight, bias)
    assert_close(out, reference.linear(x.double(), weight, bias.double()))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_a_cpu_a_stored_linear_has_the_bits_of_a_dense_one_of_its_numbers(kind: Kind) -> None:
    weight = random_weight(kind, 53, columns_of(kind, 4))
    x = randn(37, weight.k, dtype=torch.float32, device="cpu")
    for tokens in (1, 2, 37):
        dense = ops.linear(x[:tokens], dequantized(weight))
        assert_same_bits(ops.linear(x[:tokens], weight), dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_alone_has_the_bits_it_has_in_a_batch_of_a_stored_linear(
    device: str, dtype: torch.dtype, kind: Kind
) -> None:
    weight = random_weight(kind, 70, columns_of(kind, 2), device)
    x = randn(50, weight.k, dtype=dtype, device=device)
    together = ops.linear(x, weight)
    for size in (1, 2, 3, 17):
        parts = [ops.linear(part, weight) for part in x.split(size)]
        assert_same_bits(torch.cat(parts), together)
    alone = poisoned(70, dtype=dtype, device=device)
    ops.gemv_into(alone, x[7], weight)
    assert_same_bits(alone, together[7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [0, 5, 6])
@pytest.mark.parametrize("kind", SOME, ids=str)
def test_fused_ops_have_the_bits_of_the_separate_ones_of_a_stored_weight(
    device: str, dtype: torch.dtype, kind: Kind, gap: int
) -> None:
    """In vectors and not, with counts; weights lie nowhere aligned where there is a gap."""
    n, tokens, width = 140, 6, 70
    k = columns_of(kind, 3) if gap else 768
    gate_up = random_weight(kind, n, k, device)
    weight = in_wider_rows(gate_up, gap)
    x, norm, bias, residual, gain = (
        randn(*shape, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate([(tokens, k), (k,), (n,), (tokens, n), (n,)])
    )
    x = in_wider_tokens(x) if gap else x
    counts = ints([tokens - 1], device)
    normed = torch.empty(tokens, k, dtype=dtype, device=device)
    ops.rms_norm_into(normed, x, norm, EPS)

    def empty(columns: int) -> Tensor:
        return torch.zeros(tokens, columns, dtype=dtype, device=device)

    out, y = empty(n), ops.linear(normed, weight, bias)
    ops.norm_linear_into(out, x, norm, EPS, weight, bias, counts)
    assert_same_bits(out[:-1], y[:-1])
    assert not out[-1].any()

    act = ops.silu_mul(y)
    fused, plain = empty(width), empty(width)
    ops.norm_swiglu_into(fused, x, norm, EPS, gate_up, bias)
    assert_same_bits(fused, act)
    ops.swiglu_into(plain, normed, gate_up, bias)
    assert_same_bits(plain, act)

    added, normalized, also = residual.clone(), empty(n), residual.clone()
    product = ops.linear(x, weight, bias)
    ops.linear_residual_(added, x, weight, bias)
    assert_same_bits(added, residual + product)
    ops.linear_norm_into(normalized, also, x, weight, gain, EPS, bias)
    assert_same_bits(also, added)
    again = empty(n)
    ops.rms_norm_into(again, added, gain, EPS)
    assert_same_bits(normalized, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_embedding_is_a_row_of_numbers_rounded_once(
    device: str, dtype: torch.dtype, kind: Kind
) -> None:
    """Beside embeddings that tokens bring along, dead tokens and ids that are not there."""
    weight = random_weight(kind, 130, columns_of(kind, 1), device)
    embeds = randn(2, weight.k, dtype=dtype, device=device)
    rows = [(129, 1), (0, 1), (-2, 1), (5, 0), (130, 1), (-3, 1), (-4, 1), (-1, 1), (-3, 0)]
    meta = ints([[token, 0, length, 1] for token, length in rows], device)
    out = poisoned(len(rows), weight.k, dtype=dtype, device=device)
    ops.embedding_into(out, meta, weight, embeds)
    numbers = dequantized(weight).to(dtype)
    zeros = torch.zeros_like(embeds[0])
    expected = [numbers[129], numbers[0], embeds[0], zeros, zeros, embeds[1], zeros, zeros, zeros]
    assert torch.equal(out, torch.stack(expected))
    reference.embedding_into(again := torch.empty_like(out), meta, weight, embeds)
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_numbers_of_a_weight_are_written_rounded_once(
    device: str, dtype: torch.dtype, kind: Kind
) -> None:
    """Also between others, of rows that lie apart."""
    weight = random_weight(kind, 130, columns_of(kind, 1), device)
    out = poisoned(130, weight.k + 8, dtype=dtype, device=device)
    ops.dequantize_into(out[:, :-8], in_wider_rows(weight, 3))
    assert torch.equal(out[:, :-8], dequantized(weight).to(dtype))
    assert bool(out[:, -8:].isnan().all())


def test_a_dense_weight_has_nothing_to_be_decoded() -> None:
    with pytest.raises(RuntimeError, match="dequantize_into: weight is dense, expected one that"):
        ops.dequantize_into(torch.zeros(2, 4), Weight(torch.zeros(2, 4)))
    with pytest.raises(RuntimeError, match=r"weight has shape \[130, 180\], expected \[4, 36\]"):
        ops.dequantize_into(torch.zeros(4, 64), BLOCKS)


def test_a_weight_is_split_by_rows_with_its_scales() -> None:
    """Where blocks have whole rows, and where each row has its scales."""
    for kind in (KINDS[2], *SOME):
        weight = random_weight(kind, 300, 256)
        parts = list(weight.split([128, 128, 44]))
        assert [part.n for part in parts] == [128, 128, 44]
        assert torch.equal(torch.cat([*map(dequantized, parts)]), dequantized(weight))
        assert sum(part.nbytes for part in parts) == weight.nbytes


SCALE = torch.ones(130, 3)
INT4 = random_weight(KINDS[3], 130, 320)
INT8 = random_weight(Kind(WeightFormat.INT8, 1, 32), 130, 320)
BLOCKS = random_weight(Kind(WeightFormat.Q4_0), 130, 320)
MXFP4, NVFP4 = (random_weight(kind, 130, 320) for kind in KINDS[6:8])
DIVISOR = torch.ones(130, 1)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Weight(torch.zeros(130, 320).to(FP8)), "weight_scale is None, expected float32 [n, 1], ["),
        (
            Weight(torch.zeros(130, 320).to(FP8), WeightFormat.FP8, torch.ones(130)),
            "weight_scale has shape [130], expected 2 dimensions",
        ),
        (
            Weight(torch.zeros(130, 320).to(FP8), WeightFormat.FP8, torch.ones(130, 2)),
            "weight_scale has shape [130, 2], expected [130, 3]",
        ),
        (
            Weight(torch.zeros(130, 320).to(FP8), WeightFormat.FP8, torch.ones(3, 3)),
            "weight_scale has shape [3, 3], expected [2, 3]",
        ),
        (
            Weight(torch.zeros(130, 320).to(FP8), WeightFormat.FP8, SCALE.bfloat16()),
            "weight_scale has dtype bfloat16, expected float32",
        ),
        (
            Weight(torch.zeros(130, 320), WeightFormat.FP8, SCALE),
            "weight has dtype float32, expected float8_e4m3fn",
        ),
        (
            Weight(torch.zeros(130, 320), WeightFormat.DENSE, SCALE),
            "weight_scale is a tensor, expected None, because weight is stored as dense",
        ),
        (
            Weight(torch.zeros(130, 320).to(torch.float8_e5m2)),
            "weight has dtype float8_e5m2, expected float32, the d",
        ),
        (replace(INT4, scale=None), "weight_scale is None, expected [n of the weight, groups of"),
        (replace(INT4, scale=torch.ones(130, 3)), "weight_scale has 3 groups for 320 columns, exp"),
        (replace(INT4, scale=torch.ones(130, 20)), "weight_scale has 20 groups for 320 columns, e"),
        (replace(INT4, scale=torch.ones(130, 0)), "weight_scale has 0 groups for 320 columns, exp"),
        (replace(INT4, scale=torch.ones(129, 10)), "weight_scale has shape [129, 10], expected ["),
        (replace(INT4, scale=SCALE.int()), "weight_scale has dtype int32, expected "),
        (
            replace(INT4, zero=torch.ones(130, 10)),
            "weight_zero has dtype float32, expected float16, the dtype of weight_scale, or uint8",
        ),
        (
            replace(INT4, scale=torch.ones(130, 10), zero=torch.ones(130, 10)),
            "weight_zero and weight_scale have dtype float32, expected float16 or bfloat16, or a",
        ),
        (
            replace(INT8, zero=torch.ones(130, 10, dtype=torch.uint8)),
            "weight_zero is a tensor, expected None, because weight is stored as int8",
        ),
        (replace(INT8, scale=torch.ones(130, 40)), "weight_scale has 40 groups for 320 columns, e"),
        (
            replace(INT4, zero=torch.ones(130, 5, dtype=torch.uint8)),
            "weight_zero has shape [130, 5], expected [130, 10] (the shape of weight_scale)",
        ),
        (replace(INT4, data=INT4.data[:, 1:]), "weight has shape [130, 159], expected [*, 160]"),
        (
            replace(BLOCKS, data=BLOCKS.data.int()),
            "weight has dtype int32, expected uint8, because",
        ),
        (replace(BLOCKS, scale=SCALE), "weight_scale is a tensor, expected None, because weight i"),
        (
            replace(BLOCKS, zero=BLOCKS.data),
            "weight_zero is a tensor, expected None, because weight is stored as q4_0",
        ),
        (replace(BLOCKS, divisor=DIVISOR), "weight_divisor is a tensor, expected None, because w"),
        (replace(INT4, divisor=DIVISOR), "weight_divisor is a tensor, expected None, because w"),
        (replace(MXFP4, scale=None), "weight_scale is None, expected uint8 [n of the weight, bl"),
        (replace(NVFP4, scale=None), "weight_scale is None, expected float8_e4m3fn [n of the w"),
        (
            replace(MXFP4, scale=torch.ones(130, 10)),
            "weight_scale has dtype float32, expected uint8, because it is stored as e8m0",
        ),
        (
            replace(NVFP4, scale=torch.ones(130, 20, dtype=torch.uint8)),
            "weight_scale has dtype uint8, expected float8_e4m3fn",
        ),
        (
            replace(MXFP4, scale=torch.ones(130, 20, dtype=torch.uint8)),
            "weight_scale has shape [130, 20], expected [130, 10] (",
        ),
        (replace(NVFP4, scale=NVFP4.data.view(FP8)), "weight_scale has shape [130, 160], expec"),
        (replace(NVFP4, zero=NVFP4.data), "weight_zero is a tensor, expected None, because we"),
        (replace(NVFP4, divisor=DIVISOR.half()), "weight_divisor has dtype float16, expected f"),
        (replace(NVFP4, divisor=DIVISOR[0]), "weight_divisor has shape [1], expected [130, 1] ("),
        (replace(NVFP4, divisor=DIVISOR[:1]), "weight_divisor has shape [1, 1], expected [130, "),
        (
            replace(NVFP4, divisor=DIVISOR[:1].expand(130, 1)),
            "weight_divisor has shape [130, 1] with strides [0, 1], expected a contiguous t",
        ),
        (
            replace(NVFP4, format=WeightFormat.Q4_K),
            "x has 320 columns, expected a multiple of 256, the block of q4_k",
        ),
        (
            replace(BLOCKS, format=WeightFormat.Q5_1),
            "weight has shape [130, 180], expected [*, 240]",
        ),
    ],
)
def test_parts_of_a_weight_that_do_not_belong_together_are_refused(
    weight: Weight, message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"linear_into: {message}")):
        ops.linear(torch.zeros(2, 320), weight)


def test_a_format_that_is_not_known_is_refused() -> None:
    out, x, weight = torch.zeros(2, 4), torch.zeros(2, 8), torch.zeros(4, 8)
    raw: Any = torch.ops.photon_ext.linear_into
    for code in (-1, 14):
        with pytest.raises(RuntimeError, match=f"weight_format is {code}, expected 0 to 13"):
            raw(out, x, weight, weight_format=code)


@pytest.mark.parametrize("part", ["data", "scale", "zero", "divisor"])
def test_an_output_within_a_part_of_the_weight_is_refused(part: str) -> None:
    weight = random_weight(KINDS[7] if part == "divisor" else KINDS[5], 8, 1024)
    shared = getattr(weight, part)
    memory = shared.view(-1).view(torch.uint8)[:32].view(torch.float32)
    name = {"data": "weight"}.get(part, f"weight_{part}")
    with pytest.raises(RuntimeError, match=f"out shares memory with {name}"):
        ops.linear_into(memory.view(1, 8), torch.zeros(1, 1024), weight)


def test_a_table_and_its_output_of_other_sizes_are_refused() -> None:
    meta = ints([[0, 0, 1, 1]], "cpu")
    with pytest.raises(
        RuntimeError, match="out has 100 columns, expected a multiple of 32, the bl"
    ):
        ops.embedding_into(torch.zeros(1, 100), meta, BLOCKS)
    with pytest.raises(RuntimeError, match=r"weight has shape \[130, 180\], expected \[\*, 36\]"):
        ops.embedding_into(torch.zeros(1, 64), meta, BLOCKS)
    with pytest.raises(RuntimeError, match="out has dtype int32, expected float"):
        ops.embedding_into(torch.zeros(1, 320, dtype=torch.int32), meta, BLOCKS)
    with pytest.raises(RuntimeError, match="embeds has dtype float16, expected float32"):
        ops.embedding_into(torch.zeros(1, 320), meta, BLOCKS, torch.zeros(1, 320).half())
