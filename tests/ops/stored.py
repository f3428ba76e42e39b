"""Weights of fewer bits for tests, of random codes and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

FP8 = torch.float8_e4m3fn

# Where each block of a GGUF file has float16 numbers: all but the second of a pair are scales.
HALVES: Mapping[WeightFormat, Sequence[int]] = {
    WeightFormat.Q4_0: [0],
    WeightFormat.Q4_1: [0, 2],
    WeightFormat.Q5_0: [0],
    WeightFormat.Q5_1: [0, 2],
    WeightFormat.Q8_0: [0],
    WeightFormat.Q4_K: [0, 2],
    WeightFormat.Q5_K: [0, 2],
    WeightFormat.Q6_K: [208],
}


class Kind(NamedTuple):
    """How a weight is stored.

    Attributes:
        rows, columns: that share a scale; 0 columns: all of a row.
        scale: its dtype.
        zeros: there are zero points.
        offsets: there are such, in their place.
        divisors: there are some of rows.
    """

    format: WeightFormat
    rows: int = 1
    columns: int = 0
    scale: torch.dtype = torch.float32
    zeros: bool = False
    divisors: bool = False
    offsets: bool = False

    def __str__(self) -> str:
        parts = [self.format.value, self.rows, self.columns, str(self.scale)[6:], self.zeros]
        parts += [name for name in ("divisors", "offsets") if getattr(self, name)]
        return "-".join(map(str, parts[: 1 if self.format in HALVES else None]))

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Of the scales."""
        return -(-n // self.rows), -(-k // (self.columns or k))


KINDS = [
    Kind(WeightFormat.FP8),
    Kind(WeightFormat.FP8, 1, 128),
    Kind(WeightFormat.FP8, 128, 128),
    Kind(WeightFormat.INT4, 1, 32, torch.float16, True),
    Kind(WeightFormat.INT4, 1, 64, torch.bfloat16),
    Kind(WeightFormat.INT4, 1, 128, torch.float32, True),
    Kind(WeightFormat.MXFP4, 1, 32, torch.uint8),
    Kind(WeightFormat.NVFP4, 1, 16, FP8, divisors=True),
    *map(Kind, HALVES),
    Kind(WeightFormat.INT4, 1, 32, torch.float16, offsets=True),
    Kind(WeightFormat.INT8, 1, 16, torch.float16),
    Kind(WeightFormat.INT8, 1, 32, torch.bfloat16),
]


def random_weight(kind: Kind, n: int, k: int, device: str = "cpu", seed: int = 1) -> Weight:
    """Products with normal inputs are near 1; scales differ by up to ten times."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        256, (n, kind.format.row_bytes(k)), generator=generator, dtype=torch.uint8
    )
    if kind.format in HALVES:
        return Weight(_blocks(kind.format, codes, k, generator).to(device), kind.format)
    shape = kind.shape(n, k)
    scale = (torch.rand(shape, generator=generator) + 0.1) * k**-0.5
    if kind.format is WeightFormat.FP8:
        numbers = 100 * torch.randn(n, k, generator=generator).clamp(-4, 4)
        return Weight(numbers.to(FP8).to(device), kind.format, (0.01 * scale).to(device))
    if kind.format.is_fp4:
        return _fp4(kind, codes, scale, generator, device)
    scale = (scale * (0.2 if kind.format is WeightFormat.INT4 else 0.0125)).to(kind.scale)
    zeros = torch.randint(17, shape, generator=generator, dtype=torch.uint8)
    zero = zeros if kind.zeros else None
    if kind.offsets:
        zero = (-zeros.float() * scale.float()).to(kind.scale)
    return Weight(
        codes.to(device),
        kind.format,
        scale.to(device),
        None if zero is None else zero.to(device),
    )


def _fp4(
    kind: Kind, codes: Tensor, scale: Tensor, generator: torch.Generator, device: str
) -> Weight:
    divisor = None
    if kind.divisors:
        divisor = (100 * (torch.rand(len(codes), 1, generator=generator) + 1)).to(device)
        scale = 150 * scale
    scale = 0.5 * scale
    if kind.format is WeightFormat.MXFP4:
        scale = scale.log2().round() + 127
    return Weight(codes.to(device), kind.format, scale.to(kind.scale).to(device), divisor=divisor)


def _blocks(form: WeightFormat, codes: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Codes [n, bytes] whose scales and minima are sane."""
    blocks = codes.view(len(codes), -1, form.bytes)
    size = k**-0.5 / {WeightFormat.Q8_0: 128, WeightFormat.Q6_K: 2000}.get(form, 16)
    if form in (WeightFormat.Q4_K, WeightFormat.Q5_K):
        size /= 32
    for at in HALVES[form]:
        numbers = size * (torch.rand(blocks.shape[:2], generator=generator) + 0.1)
        halves = numbers.half()[..., None]
        blocks[..., at : at + 2] = halves.contiguous().view(torch.uint8)
    return codes


def in_wider_rows(weight: Weight, extra: int) -> Weight:
    """The same, whose rows are `extra` bytes further apart."""
    data = weight.data.view(torch.uint8)
    buffer = data.new_zeros(len(data), data.shape[1] + extra)
    view = buffer[:, : data.shape[1]]
    view.copy_(data)
    parts = weight.scale, weight.zero, weight.divisor
    return Weight(view.view(weight.data.dtype), weight.format, *parts)
