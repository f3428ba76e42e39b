"""BlockCodes: what the blocks of a GGUF file hold, taken apart: codes, scales and offsets.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat


class BlockCodes(NamedTuple):
    """A number is (code - middle) * scale, or where there are offsets code * scale + offset.

    Attributes:
        codes: uint8 [n, groups of a row, columns of a group].
        scale, offset: float32 [n, groups, 1], as the file has them, or the product of two numbers
            of it, which is exact.
        middle: the code of 0, without offsets.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    middle: int = 0

    def numbers(self) -> Tensor:
        """float32, of the shape of the codes."""
        if self.offset is not None:
            return self.codes * self.scale + self.offset
        return (self.codes.float() - self.middle) * self.scale


def block_codes(weight: Weight) -> BlockCodes:
    """Those of a weight of a GGUF file's blocks."""
    blocks = _blocks(weight)
    found = _READERS[weight.format](blocks)
    of_block = found.scale.shape[2:].numel()
    groups = weight.n, blocks.shape[1] * of_block
    codes = found.codes.reshape(*groups, weight.format.columns // of_block)
    offset = None if found.offset is None else found.offset.reshape(*groups, 1)
    return found._replace(codes=codes, scale=found.scale.reshape(*groups, 1), offset=offset)


def has_finite_scales(weight: Weight) -> bool:
    """Whether the scales and minima within the blocks of a weight of a GGUF file are finite. No
    others are read.
    """
    halves = (_half(_blocks(weight), at) for at in _HALVES[weight.format])
    return all(bool(half.isfinite().all()) for half in halves)


def nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high four bits of each byte."""
    return data & 15, data >> 4


def _shifts(blocks: Tensor, step: int = 1) -> Tensor:
    """By which bits of a byte are brought down, as bytes, so that what is shifted stays bytes."""
    return torch.arange(0, 8, step, dtype=torch.uint8, device=blocks.device)


def _blocks(weight: Weight) -> Tensor:
    return weight.data.reshape(weight.n, -1, weight.format.bytes)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [n, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """16 for each bit of four bytes that is set, [n, blocks, 32]."""
    bits = blocks[..., at : at + 4, None] >> _shifts(blocks)
    return ((bits & 1) << 4).flatten(-2)


def _four_bits(blocks: Tensor, at: int) -> Tensor:
    """Of 16 bytes from there, the columns in the low bits first: [n, blocks, 32]."""
    return torch.cat(nibbles(blocks[..., at : at + 16]), dim=-1)


def _pairs(blocks: Tensor, at: int) -> Tensor:
    """Of 128 bytes from there, 32 columns in the low bits before 32 in the high ones: [n, blocks,
    8, 32].
    """
    pairs = blocks[..., at : at + 128].unflatten(-1, (4, 32))
    return torch.stack(nibbles(pairs), dim=-2).flatten(-3, -2)


# --- of each format, by block: [n, blocks, groups of a block ...] ---------------------------------


def _q4_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(_four_bits(blocks, 2), _half(blocks, 0), middle=8)


def _q4_1(blocks: Tensor) -> BlockCodes:
    return BlockCodes(_four_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockCodes:
    codes = _four_bits(blocks, 6) | _fifth_bits(blocks, 2)
    return BlockCodes(codes, _half(blocks, 0), middle=16)


def _q5_1(blocks: Tensor) -> BlockCodes:
    codes = _four_bits(blocks, 8) | _fifth_bits(blocks, 4)
    return BlockCodes(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(blocks[..., 2:] ^ 0x80, _half(blocks, 0), middle=128)


def _k_codes(blocks: Tensor, codes: Tensor) -> BlockCodes:
    """Of codes [n, blocks, 8, 32], with the eight scales and minima of six bits each."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return BlockCodes(codes, scale * _half(blocks, 0), -(least * _half(blocks, 2)))


def _q4_k(blocks: Tensor) -> BlockCodes:
    return _k_codes(blocks, _pairs(blocks, 16))


def _q5_k(blocks: Tensor) -> BlockCodes:
    bits = blocks[..., None, 16:48] >> _shifts(blocks)[:, None]
    return _k_codes(blocks, _pairs(blocks, 48) | (bits & 1) << 4)


def _q6_k(blocks: Tensor) -> BlockCodes:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = _shifts(blocks, 2)[:, None]
    codes = torch.cat(nibbles(low), dim=-2) | (high >> shifts & 3) << 4  # [n, blocks, 2, 4, 32]
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    return BlockCodes(codes, scales, middle=32)


_READERS: Mapping[WeightFormat, Callable[[Tensor], BlockCodes]] = {
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
