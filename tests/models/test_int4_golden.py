"""Weights of four bits that compressed-tensors itself has packed, and unpacked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.int4_config import Int4Scheme, Layout, int4_scheme
from photon_ext.models.loading.int4_tensors import Int4Tensors, expected, unpacked
from tests.ops.numeric import randn


def numbers(found: Int4Tensors) -> torch.Tensor:
    """[n, k] in the dtype of the scales, as the library has them."""
    n, groups = found.scale.shape
    codes = torch.stack((found.data & 15, found.data >> 4), -1).view(n, groups, -1)
    zero = 8 if found.zero is None else found.zero[..., None].to(found.scale.dtype)
    return ((codes.to(found.scale.dtype) - zero) * found.scale[..., None]).view(n, -1)


def read_scheme(scheme: QuantizationScheme) -> Int4Scheme:
    """Of the config that the library writes."""
    groups: Any = {"group_0": scheme}
    config = QuantizationConfig(config_groups=groups, format="pack-quantized", ignore=["lm_head"])
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return int4_scheme(ConfigReader(values, "config.json"), "config.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, None])
def test_numbers_are_those_of_the_library(
    group: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group is None else "group",
        group_size=group,
        actorder=None if group is None else "static",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    weight = randn(44, 256, dtype=dtype, device="cpu")
    shares = weight.view(44, -1, group or 256)
    scale, zero = calculate_qparams(shares.amin(-1), shares.amax(-1), weights)
    tensors = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.round().to(torch.int8)},
        scheme,
    )
    wanted = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]

    found = read_scheme(scheme)
    assert found == Int4Scheme(Layout.COMPRESSED, group, not symmetric, ("lm_head",))
    assert set(expected(found, "a", 44, 256)) == {f"a.{name}" for name in tensors}
    read = unpacked(found, tensors, Path("a.safetensors"), "a")
    assert torch.equal(numbers(read), wanted)
    assert (wanted - weight).norm() < 0.15 * weight.norm(), "the library has packed this weight"
