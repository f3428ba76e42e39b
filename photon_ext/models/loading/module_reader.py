"""ModuleReader: the weight of a module as the files of a checkpoint store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from photon_ext.dequantize import fp4_scales
from photon_ext.errors import ModelError
from photon_ext.models.loading.expected import DAMAGED, Expected
from photon_ext.models.loading.int4_config import Int4Scheme
from photon_ext.models.loading.int4_tensors import expected, unpacked
from photon_ext.models.quantization import Fp4Scheme, Fp8Scheme, Quantization, ScaleShare
from photon_ext.weight import Weight
from photon_ext.weight_format import FP8_MOST, SCALE_BLOCK, WeightFormat

_E2M1_MOST = 6


class ModuleReader(Protocol):
    """Reads modules [n, k] of one kind."""

    def expected(self, module: str, n: int, k: int) -> Mapping[str, Expected]:
        """The tensors of a module, by name. ModelError: none of this size is stored so."""

    def weight(self, tensors: Mapping[str, torch.Tensor], path: Path, module: str) -> Weight:
        """Made of them, which are as expected; by the last part of their names. `path` and `module`
        are what messages name. ModelError: they have values that no kernel looks for.
        """


class PlainReader:
    """Weights in a dtype that torch multiplies in."""

    def expected(self, module: str, n: int, k: int) -> Mapping[str, Expected]:
        return {f"{module}.weight": Expected((n, k))}

    def weight(self, tensors: Mapping[str, torch.Tensor], path: Path, module: str) -> Weight:
        return Weight(tensors["weight"])


@dataclass(frozen=True)
class Fp8Reader:
    """fp8 numbers, and their scales."""

    scheme: Fp8Scheme

    def expected(self, module: str, n: int, k: int) -> Mapping[str, Expected]:
        blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        shape = {ScaleShare.TENSOR: (1, 1), ScaleShare.ROW: (n, 1), ScaleShare.BLOCK: blocks}
        return {
            f"{module}.weight": Expected((n, k), ("F8_E4M3",)),
            f"{module}.{self.scheme.scale_name}": Expected(
                shape[self.scheme.share], counts_ones=False
            ),
        }

    def weight(self, tensors: Mapping[str, torch.Tensor], path: Path, module: str) -> Weight:
        data, scale = tensors["weight"], tensors[self.scheme.scale_name].float()
        numbers = data.view(torch.uint8) & 0x7F != 0x7F  # an e4m3 of these bits is none
        scaled = (scale * FP8_MOST).isfinite()
        for name, finite in (("weight", numbers), (self.scheme.scale_name, scaled)):
            if not bool(finite.all()):
                raise ModelError(
                    f"{path}: {module}.{name} has values that are not finite, or scale numbers "
                    f"beyond float32; {DAMAGED}"
                )
        n, k = data.shape
        columns = -(-k // SCALE_BLOCK) if self.scheme.share is ScaleShare.BLOCK else 1
        scale = scale.reshape(-1, columns)
        if self.scheme.share is ScaleShare.TENSOR:
            scale = scale.expand(n, 1)
        return Weight(data, WeightFormat.FP8, scale)


@dataclass(frozen=True)
class Int4Reader:
    """Numbers of four bits, their scales and zero points."""

    scheme: Int4Scheme

    def expected(self, module: str, n: int, k: int) -> Mapping[str, Expected]:
        return expected(self.scheme, module, n, k)

    def weight(self, tensors: Mapping[str, torch.Tensor], path: Path, module: str) -> Weight:
        data, scale, zero = unpacked(self.scheme, tensors, path, module)
        return Weight(data, WeightFormat.INT4, scale, zero)


@dataclass(frozen=True)
class Fp4Reader:
    """e2m1 numbers and their scales, as compressed-tensors stores them:
    https://github.com/vllm-project/compressed-tensors (nvfp4, mxfp4).
    """

    scheme: Fp4Scheme

    def expected(self, module: str, n: int, k: int) -> Mapping[str, Expected]:
        form = self.scheme.format
        if k == 0 or k % form.columns:
            raise ModelError(
                f"{module} has {k} columns, and {form.value} asks for whole blocks of "
                f"{form.columns}; use a checkpoint that leaves this module out"
            )
        dtype = "U8" if form is WeightFormat.MXFP4 else "F8_E4M3"
        found = {
            f"{module}.weight_packed": Expected((n, k // 2), ("U8",)),
            f"{module}.weight_scale": Expected((n, k // form.columns), (dtype,)),
        }
        if form is WeightFormat.NVFP4:
            found[f"{module}.weight_global_scale"] = Expected((1,), ("F32",), counts_ones=False)
        return found

    def weight(self, tensors: Mapping[str, torch.Tensor], path: Path, module: str) -> Weight:
        data = tensors["weight_packed"]
        divisor = self._divisor(tensors, f"{path}: {module}")
        if divisor is not None:
            divisor = divisor.expand(len(data), 1)
        weight = Weight(data, self.scheme.format, tensors["weight_scale"], divisor=divisor)
        scales = fp4_scales(weight)
        finite = (scales * _E2M1_MOST).isfinite()
        if not bool(finite.all()):
            row, block = (~finite).nonzero()[0].tolist()
            raise ModelError(
                f"{path}: {module}.weight_scale is {float(scales[row, block]):g} at "
                f"{[row, block]}, and numbers of a weight are finite in float32; {DAMAGED}"
            )
        return weight

    def _divisor(self, tensors: Mapping[str, torch.Tensor], module: str) -> torch.Tensor | None:
        if self.scheme.format is WeightFormat.MXFP4:
            return torch.ones(1) if self.scheme.divides else None
        divisor = tensors["weight_global_scale"]
        if not 0 < float(divisor) < torch.inf:
            raise ModelError(
                f"{module}.weight_global_scale is {float(divisor):g}, and scales are divided by "
                f"it; {DAMAGED}"
            )
        return divisor.reshape(1)


def module_reader(quantization: Quantization | None, module: str) -> ModuleReader:
    """Of a checkpoint whose `quantization_config` this is."""
    if quantization is not None and quantization.of(module) is not None:
        if isinstance(quantization, Fp8Scheme):
            return Fp8Reader(quantization)
        if isinstance(quantization, Int4Scheme):
            return Int4Reader(quantization)
        if isinstance(quantization, Fp4Scheme):
            return Fp4Reader(quantization)
    return PlainReader()
