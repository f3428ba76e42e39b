"""Rounded weights: known numbers by hand, error bounds of each format, and clear errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from photon_ext.dequantize import dequantized
from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.loading import round_to_nearest
from photon_ext.models.loading.round_to_nearest import fp8_rows, int4_groups
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat
from tests.ops.numeric import randn

Quantizer = Callable[[torch.Tensor], Any]
BOTH = pytest.mark.parametrize("quantize", [fp8_rows, int4_groups])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def values(quantize: Quantizer, weight: torch.Tensor) -> torch.Tensor:
    """What the stored numbers stand for."""
    return numbers(*quantize(weight))


def numbers(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    form = WeightFormat.INT4 if data.dtype is torch.uint8 else WeightFormat.FP8
    return dequantized(Weight(data, form, scale))


# --- known numbers --------------------------------------------------------------------------------


def test_fp8_of_known_numbers() -> None:
    """e4m3 has 16, 18, 20 between 16 and 20, and steps of 2^-9 next to 0; halves go to even."""
    weight = torch.tensor([[448.0, 16.9, 17.0, 19.0, -300.0, 0.0], [-7.0, 3.5, 1e-9, 0, 0, 0]])
    data, scale = fp8_rows(weight)
    assert scale.tolist() == [[1.0], [7 / 448]]
    assert data.float().tolist() == [
        [448.0, 16.0, 16.0, 20.0, -288.0, 0.0],
        [-448.0, 224.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_int4_of_known_numbers_and_their_nibbles() -> None:
    """Column 2i is in the low bits of byte i; a scale has the other sign than the number of the
    largest magnitude.
    """
    weight = torch.tensor([[-4.0, 0.5, 1.2, -0.3, 8.0, 1.0, -1.4, -7.0]])
    data, scale = int4_groups(weight, 4)
    assert scale.dtype is torch.float16
    assert scale.tolist() == [[0.5, -1.0]]
    codes = [-8, 1, 2, -1, -8, -1, 1, 7]
    nibbles = [code + 8 for code in codes]
    assert data.tolist() == [[nibbles[i] + 16 * nibbles[i + 1] for i in range(0, 8, 2)]]
    assert numbers(data, scale).tolist() == [[-4.0, 0.5, 1.0, -0.5, 8.0, 1.0, -1.0, -7.0]]


def test_all_sixteen_numbers_are_kept() -> None:
    weight = 0.25 * torch.arange(-8.0, 8.0).repeat(3, 8)
    data, scale = int4_groups(weight)
    assert (data.shape, scale.shape) == ((3, 64), (3, 1))
    assert torch.equal(numbers(data, scale), weight)
    assert sorted({*(data & 15).flatten().tolist()}) == list(range(0, 16, 2))


@pytest.mark.parametrize("most", [1e-38, 7.0, 448.0, 464.0, 465.0, 1e4, 3.4e38])
def test_hazard_c13_the_largest_numbers_of_fp8_never_become_nan(most: float) -> None:
    """e4m3fn has no infinity: torch makes 448 of 464, and NaN of 465. Minus zero stays."""
    weight = most * torch.linspace(0.5, 1, 1001)[:, None] * torch.tensor([1.0, -1, 0.99, -0.0])
    data, scale = fp8_rows(weight)
    assert data.view(torch.uint8)[:, 3].tolist() == [0x80] * 1001
    assert bool((data.view(torch.uint8) & 0x7F != 0x7F).all())
    if most > 1e-30:  # the smallest scale reaches no further
        assert data.float()[:, :2].tolist() == [[448.0, -448.0]] * 1001
    assert bool(((data.float() * scale)[:, :3] / weight[:, :3] - 1).abs().max() < 0.07)


# --- bounds ---------------------------------------------------------------------------------------


@DTYPES
def test_fp8_is_as_near_as_three_bits_of_mantissa(dtype: torch.dtype, device: str) -> None:
    weight = randn(37, 200, dtype=dtype, device=device) * torch.logspace(-6, 1, 37)[:, None].to(
        device, dtype
    )
    data, scale = fp8_rows(weight)
    assert (data.dtype, data.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (37, 1))
    assert bool((data.float().abs().amax(1) == 448).all()), "each row uses the whole range"
    error = (numbers(data, scale) - weight.float()).abs()
    bound = torch.maximum(weight.float().abs() * 2**-4, scale * 2**-10)
    assert bool((error <= bound * (1 + 1e-5)).all())


@DTYPES
@pytest.mark.parametrize("group", [2, 32, 128])
def test_int4_is_as_near_as_half_a_step(dtype: torch.dtype, group: int, device: str) -> None:
    """But for numbers that lie beyond 7 steps on the side where there is no eighth."""
    weight = (0.02 * randn(33, 256, dtype=torch.float32, device=device)).to(dtype)
    data, scale = int4_groups(weight, group)
    assert (data.dtype, data.shape) == (torch.uint8, (33, 128))
    assert scale.shape == (33, 256 // group)
    steps = scale.float().repeat_interleave(group, 1)
    error = (numbers(data, scale) - weight.float()).abs()
    beyond = weight.float() / steps > 7.5
    assert bool((error <= 0.501 * steps.abs())[~beyond].all())
    assert bool((error <= 1.001 * steps.abs())[beyond].all())
    assert 0 < int(beyond.sum()) < weight.numel() // group


@BOTH
def test_rows_and_groups_of_zeros_are_zeros(quantize: Quantizer) -> None:
    weight = randn(5, 256, dtype=torch.float32, device="cpu")
    weight[1] = 0
    weight[3, :128] = 0
    _, scale = quantize(weight)
    assert bool(scale.isfinite().all())
    assert bool((scale != 0).all()), "a kernel may divide by one"
    found = values(quantize, weight)
    assert torch.equal(found[weight == 0], weight[weight == 0])
    assert bool(found.isfinite().all())


@BOTH
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-7, 4.2e-7, 1e-5, 1.0, 4e5])
def test_numbers_of_any_size_stay_near(quantize: Quantizer, size: float) -> None:
    """Down to those that the scale has no bits for, which are as small as nothing."""
    weight = size * torch.linspace(-1, 1, 256).view(2, 128)
    found = values(quantize, weight)
    assert bool(found.isfinite().all())
    bound = max(0.13 * size, 2**-24 if quantize is int4_groups else 2**-126)
    assert float((found - weight).abs().max()) <= bound


def test_the_largest_numbers_of_float32_have_a_scale_in_fp8() -> None:
    most = torch.finfo(torch.float32).max
    assert values(fp8_rows, torch.tensor([[most, -most, 0.0]])).tolist() == [[most, -most, 0.0]]


@BOTH
def test_blocks_of_rows_change_nothing(
    quantize: Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = randn(50, 128, dtype=torch.bfloat16, device="cpu")
    before = quantize(weight)
    monkeypatch.setattr(round_to_nearest, "_BLOCK", 128 * 7)
    for one, other in zip(before, quantize(weight), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@BOTH
def test_a_weight_that_is_a_view_is_read_as_it_is_seen(quantize: Quantizer) -> None:
    weight = randn(128, 256, dtype=torch.float32, device="cpu")
    assert torch.equal(values(quantize, weight.t()), values(quantize, weight.t().contiguous()))


# --- errors ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_place(
    quantize: Quantizer, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_to_nearest, "_BLOCK", 256)
    weight = torch.ones(9, 128)
    weight[7, 3] = number
    with pytest.raises(ModelError, match=f"is {number} at row 7, column 3; .* damaged"):
        quantize(weight)


@pytest.mark.parametrize(
    ("k", "group"), [(576, 128), (100, 128), (128, 0), (129, 43), (128, -128), (127, 127)]
)
def test_columns_that_are_no_whole_groups_are_refused(k: int, group: int) -> None:
    with pytest.raises(ConfigError, match=f"has {k} columns, .* groups of {group};"):
        int4_groups(torch.ones(2, k), group)


@BOTH
@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (torch.ones(128), r"torch.float32 \[128\]"),
        (torch.ones(2, 128, dtype=torch.int8), r"torch.int8 \[2, 128\]"),
        (torch.ones(0, 128), r"torch.float32 \[0, 128\]"),
        (torch.ones(3, 0), r"torch.float32 \[3, 0\]"),
    ],
)
def test_what_is_no_matrix_of_floats_is_refused(
    quantize: Quantizer, weight: torch.Tensor, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        quantize(weight)


def test_numbers_beyond_a_scale_in_float16_are_refused() -> None:
    with pytest.raises(ModelError, match=r"magnitude 1e\+06, .* reach 524032; leave"):
        int4_groups(torch.full((1, 128), 1e6))
