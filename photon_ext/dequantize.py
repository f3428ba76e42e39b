"""dequantized: the numbers of a weight of any format, in plain PyTorch.

Each is rounded to float32 once (where its scale is divided, that was before), as kernels do. Blocks
are those of GGUF files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. e2m1 and
e8m0: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
    data, form = weight.data, weight.format
    blocks = data.reshape(len(data), -1, form.bytes)
    return _BLOCKS[form](blocks).reshape(len(data), weight.k)


def has_finite_scales(weight: Weight) -> bool:
    """Whether the scales and minima within the blocks of a weight of a GGUF file are finite. No
    others are read.
    """
    blocks = weight.data.reshape(weight.n, -1, weight.format.bytes)
    halves = (_half(blocks, at) for at in _HALVES[weight.format])
    return all(bool(half.isfinite().all()) for half in halves)


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
    codes = torch.stack(_nibbles(weight.data), dim=-1) if is_int4 else weight.data
    groups = codes.view(weight.n, weight.scale.shape[1], -1).float()
    scale, zero = weight.scale.float()[..., None], weight.zero
    if zero is not None and zero.is_floating_point():
        return (groups * scale + zero.float()[..., None]).flatten(1)
    middle = 8 if is_int4 else 128
    return ((groups - (middle if zero is None else zero.float()[..., None])) * scale).flatten(1)


def _e2m1(weight: Weight) -> Tensor:
    codes = torch.stack(_nibbles(weight.data), dim=-1).view(weight.n, -1, weight.format.columns)
    numbers = torch.tensor(_E2M1, device=codes.device)[codes.int()]
    return (numbers * fp4_scales(weight)[..., None]).flatten(1)


def _nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    return data & 15, data >> 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [n, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """16 for each bit of four bytes that is set, [n, blocks, 32]."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, device=blocks.device)
    return ((bits & 1) << 4).flatten(-2)


def _four_bits(blocks: Tensor, at: int) -> Tensor:
    """Of 16 bytes from there, the columns in the low bits first: [n, blocks, 32]."""
    return torch.cat(_nibbles(blocks[..., at : at + 16]), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_four_bits(blocks, 2).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _four_bits(blocks, 4) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _four_bits(blocks, 6) | _fifth_bits(blocks, 2)
    return (codes.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _four_bits(blocks, 8) | _fifth_bits(blocks, 4)
    return codes * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].contiguous().view(torch.int8) * _half(blocks, 0)


def _scaled_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """Of codes [n, blocks, 8, 32], by the eight scales and minima of six bits each."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    factor, offset = scale * _half(blocks, 0), least * _half(blocks, 2)
    return codes * factor[..., None] - offset[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))
    return _scaled_k(blocks, torch.stack(_nibbles(pairs), dim=-2).flatten(-3, -2))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = blocks[..., None, 16:48] >> torch.arange(8, device=blocks.device)[:, None]
    pairs = blocks[..., 48:].unflatten(-1, (4, 32))
    codes = torch.stack(_nibbles(pairs), dim=-2).flatten(-3, -2)
    return _scaled_k(blocks, codes | (bits & 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, device=blocks.device)[:, None]
    codes = torch.cat(_nibbles(low), dim=-2) | (high >> shifts & 3) << 4  # [n, blocks, 2, 4, 32]
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    numbers: Tensor = (codes.float() - 32).unflatten(-1, (2, 16))
    return numbers.mul(scales.unflatten(-1, (2, 4, 2))[..., None])


# By code. There is a -0, which is read as 0.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_BLOCKS: Mapping[WeightFormat, Callable[[Tensor], Tensor]] = {
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q4_1: _q4_1,
    WeightFormat.Q5_0: _q5_0,
    WeightFormat.Q5_1: _q5_1,
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q5_K: _q5_k,
    WeightFormat.Q6_K: _q6_k,
}

# Where a block has numbers in float16: its scale, and its minimum.
_HALVES: Mapping[WeightFormat, tuple[int, ...]] = {
    WeightFormat.Q4_0: (0,),
    WeightFormat.Q4_1: (0, 2),
    WeightFormat.Q5_0: (0,),
    WeightFormat.Q5_1: (0, 2),
    WeightFormat.Q8_0: (0,),
    WeightFormat.Q4_K: (0, 2),
    WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
}
