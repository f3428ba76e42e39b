"""A model in the formats that weights may have, made of the same model as it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.common.options import DTYPES
from benchmarks.common.result import BenchmarkError
from photon_ext import reference
from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.block import Block
from photon_ext.models.layers.projection import Projection, projections_of
from photon_ext.models.loading.round_to_nearest import fp8_rows, int4_groups, int4_values
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots

GROUPS = (128, 64, 32)  # columns that share a scale of int4: the first that divides a weight's
WITH_HEAD = "+head"
ROUNDED = ("fp8", "int4")
FORMATS = (*DTYPES, *(name + end for name in ROUNDED for end in ("", WITH_HEAD)))


class Candidate(NamedTuple):
    """A model to compare with the one that it was made of.

    Attributes:
        weights: what runs.
        step_bytes: what a decode step reads of weights that are stored in this format.
        as_stored: they are what runs. Else the numbers are those of the format, and the kernels
            those of plain weights: it has a quality, and no speed.
        remark: what else is to be said of the format; "": nothing.
    """

    weights: DecoderWeights
    step_bytes: int
    as_stored: bool
    remark: str = ""


def in_format(name: str, config: ModelConfig, weights: DecoderWeights) -> Candidate:
    """The model in a format of FORMATS. A name of DTYPES: all of it in that dtype. "fp8" and
    "int4": the linears of the layers rounded to nearest, "fp8+head" and "int4+head": the head, too.
    """
    if name in DTYPES:
        made = converted(config, weights, DTYPES[name])
        return Candidate(made, made.bytes_per_step, True)
    kind = name.removesuffix(WITH_HEAD)
    rounding = _Rounding(_fp8 if kind == "fp8" else _int4, weights.dtype)
    layers = tuple(_mapped_block(block, rounding) for block in weights.layers)
    head = rounding(weights.head) if name.endswith(WITH_HEAD) else weights.head
    made = replace(weights, layers=layers, head=head)
    # what is left as it is counts as if it were in 16 bits
    others = weights.bytes_per_step // weights.dtype.itemsize - rounding.numbers
    return Candidate(made, 2 * others + rounding.stored, False, rounding.remark(name))


def converted(config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """The same parameters in another dtype."""
    if dtype is weights.dtype:
        return weights
    made = empty_weights(config, dtype, weights.device)
    pairs = zip(weight_slots(made), weight_slots(weights), strict=True)
    for (_, slot), (_, values) in pairs:
        slot.copy_(values)
    bias = weights.head.bias
    return made if bias is None else replace(made, head=replace(made.head, bias=bias.to(dtype)))


class _Rounding:
    """Projections with the values that their weights have once they are rounded, in the dtype of
    the model; counts what it has rounded.

    Attributes:
        numbers, stored: of the weights: how many, and the bytes that they then take.
    """

    def __init__(
        self, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, int, int]], dtype: torch.dtype
    ) -> None:
        self._quantize, self._dtype = quantize, dtype
        self._shares: set[tuple[int, int]] = set()
        self.numbers = self.stored = 0

    def __call__(self, projection: Projection) -> Projection:
        data = projection.weight.data
        if data.dtype is not self._dtype:
            raise BenchmarkError(
                f"a weight is stored as {data.dtype} already; give a model whose weights are plain"
            )
        values, stored, group = self._quantize(data)
        self.numbers += data.numel()
        self.stored += stored
        self._shares.add((data.shape[1], group))
        weight = replace(projection.weight, data=values.to(self._dtype))
        return replace(projection, weight=weight)

    def remark(self, name: str) -> str:
        """Where weights have other groups than GROUPS[0]."""
        others = [f"of {group} where k is {k}" for k, group in sorted(self._shares) if group < k]
        smaller = any(group < min(k, GROUPS[0]) for k, group in self._shares)
        return f"{name}: groups {', '.join(others)}" if smaller else ""


def _mapped_block(block: Block, change: _Rounding) -> Block:
    return Block(_mapped(block.attention, change), _mapped(block.mlp, change))


def _mapped(part: Any, change: _Rounding) -> Any:
    changed = {name: change(one) for name, one in projections_of(part).items()}
    return replace(part, **changed)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Values, bytes, and the columns that share a scale."""
    data, scale = fp8_rows(weight)
    return reference.dequantized(data, scale), data.nbytes + scale.nbytes, weight.shape[1]


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    k = weight.shape[1]
    group = next((size for size in GROUPS if k % size == 0), None)
    if group is None:
        raise BenchmarkError(f"int4: a weight has {k} columns, which no group of {GROUPS} divides")
    data, scale = int4_groups(weight, group)
    return int4_values(data, scale), data.nbytes + scale.nbytes, group
