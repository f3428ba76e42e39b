"""dequantized: the numbers of a weight of any format, in plain PyTorch.

Each is rounded to float32 once (where its scale is divided, that was before), as kernels do. Blocks
of GGUF files are read in block_codes.py. e2m1 and e8m0:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from photon_ext.block_codes import block_codes, nibbles
from photon_ext.weight import Weight
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat


def dequantized(weight: Tensor | Weight) -> Tensor:
    """[n, k] of float32; of a dense weight the tensor itself."""
    if isinstance(weight, Tensor):
        return weight
    if weight.format is WeightFormat.DENSE:
        return weight.data
    if weight.format is WeightFormat.FP8:
        return weight.data.float() * _of_columns(weight)
    if weight.format.is_int:
        return _integers(weight)
    if weight.format.is_fp4:
        return _e2m1(weight)
    return block_codes(weight).numbers().reshape(weight.n, weight.k)


def fp4_scales(weight: Weight) -> Tensor:
    """What the blocks of MXFP4 and NVFP4 are multiplied by, float32 [n, blocks of a row]; NaN where
    a scale is.
    """
    assert weight.scale is not None
    is_e8m0 = weight.format is WeightFormat.MXFP4
    stored = weight.scale.view(torch.float8_e8m0fnu) if is_e8m0 else weight.scale
    scale = stored.float()
    return scale if weight.divisor is None else scale / weight.divisor


def _of_columns(weight: Weight) -> Tensor:
    """The scales of fp8, [n, k] or [n, 1]."""
    assert weight.scale is not None
    rows, columns = weight.scale.shape
    scale = weight.scale
    if rows != weight.n:
        scale = scale.repeat_interleave(SCALE_BLOCK, 0)[: weight.n]
    return scale if columns == 1 else scale.repeat_interleave(SCALE_BLOCK, 1)[:, : weight.k]


def _integers(weight: Weight) -> Tensor:
    assert weight.scale is not None
    is_int4 = weight.format is WeightFormat.INT4
    codes = torch.stack(nibbles(weight.data), dim=-1) if is_int4 else weight.data
    groups = codes.view(weight.n, weight.scale.shape[1], -1).float()
    scale, zero = weight.scale.float()[..., None], weight.zero
    if zero is not None and zero.is_floating_point():  # in float64 a product is exact
        return (groups.double() * scale.double() + zero.double()[..., None]).float().flatten(1)
    middle = 8 if is_int4 else 128
    return ((groups - (middle if zero is None else zero.float()[..., None])) * scale).flatten(1)


def _e2m1(weight: Weight) -> Tensor:
    codes = torch.stack(nibbles(weight.data), dim=-1).view(weight.n, -1, weight.format.columns)
    numbers = torch.tensor(_E2M1, device=codes.device)[codes.int()]
    return (numbers * fp4_scales(weight)[..., None]).flatten(1)


# By code. There is a -0, which is read as 0.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
