"""How steps run projections whose weights are in fp8 by tokens in fp8 (KernelPlan.fp8_activations):
a token's largest magnitude gives it a scale of its own.

What a projection reads is rounded by an op in front of it; where that is a normalized residual, by
the linear of a batch that ends in the norm. Projections of other weights read tokens as they are,
and so does torch where blocks of a weight have scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from photon_ext import ops
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.models.kernel_plan import ExecutionMode, takes_fp8_product
from photon_ext.models.layers.projection import (
    EXECUTIONS,
    Batch,
    Execution,
    Projection,
    TorchProducts,
    norm_of,
)
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat


class Fp8Batch(Batch):
    """The Hopper linears for a batch."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._normed: Fp8Tokens | None = None  # the normalized residual, where it was left in fp8

    def project(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        reads = any(map(_is_fp8, projection.weights))
        tokens = self._tokens(x) if reads else None
        for part, weight, bias in projection.segments(out):
            read = tokens if tokens is not None and _is_fp8(weight) else x
            ops.linear_into(part, read, weight, bias, *self._how())

    def swiglu(self, act: torch.Tensor, projection: Projection, down: Projection) -> None:
        weight, bias = projection.operands()
        ops.swiglu_into(act, self._read(self.hidden, weight), weight, bias, *self._how())

    def add(self, projection: Projection, x: torch.Tensor, following: Projection) -> None:
        buffers, (weight, bias) = self.buffers, projection.operands()
        read, normed = self._read(x, weight), None
        # The head reads the tokens that are sampled, of all that are normalized.
        if isinstance(read, Fp8Tokens) and not following.shape.is_head and _reads_fp8(following):
            normed = self._workspaces.normed_tokens(*buffers.normed.shape)
        ops.linear_norm_into(
            buffers.normed if normed is None else normed,
            buffers.residual,
            read,
            weight,
            norm_of(following),
            self._eps,
            bias,
            *self._how(),
            workspace=self._workspaces.batch,
        )
        self._normed = normed

    def _how(self) -> tuple[torch.Tensor | None, bool, bool]:
        """counts, hopper, pdl."""
        return self._counts, True, True

    def _read(self, x: torch.Tensor, weight: Weight) -> torch.Tensor | Fp8Tokens:
        """`x` as this weight is multiplied by it."""
        return self._tokens(x) if _is_fp8(weight) else x

    def _tokens(self, x: torch.Tensor) -> Fp8Tokens:
        if x is self.hidden and self._normed is not None:
            return self._normed
        tokens = self._workspaces.read_tokens(*x.shape)
        ops.quantize_fp8_into(tokens, x, self._counts)
        return tokens


class Fp8TorchProducts(TorchProducts):
    """torch's products of fp8 by fp8, where a row has one scale; other weights are decoded."""

    def _multiply_one(
        self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> None:
        scale = weight.scale
        fits = weight.has_row_scales and takes_fp8_product(weight.n, weight.k)
        if not (fits and out.is_contiguous()):
            super()._multiply_one(out, x, weight, bias)
            return
        assert scale is not None
        tokens = self._workspaces.read_tokens(*x.shape)
        ops.quantize_fp8_into(tokens, x)
        # Sums are not promoted: of 12,288 columns of random numbers these were off by 0.31 %, and
        # promoted ones by 0.17, which is what rounding them to bfloat16 takes.
        torch.ops.aten._scaled_mm.out(
            tokens.data,
            weight.data.t(),
            tokens.scale[:, None],
            scale.t(),
            bias,
            None,
            out.dtype,
            True,
            out=out,
        )


FP8_EXECUTIONS: Mapping[ExecutionMode, type[Execution]] = {
    **EXECUTIONS,
    ExecutionMode.BATCH: Fp8Batch,
    ExecutionMode.TORCH: Fp8TorchProducts,
}


def _is_fp8(weight: Weight) -> bool:
    return weight.format is WeightFormat.FP8


def _reads_fp8(projection: Projection) -> bool:
    return all(map(_is_fp8, projection.weights))
