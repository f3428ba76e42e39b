"""ModuleReader: the weight of a module as the files of a checkpoint store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from photon_ext.errors import ModelError
from photon_ext.models.loading.expected import Expected
from photon_ext.models.loading.int4_config import Int4Scheme
from photon_ext.models.loading.int4_tensors import expected, unpacked
from photon_ext.models.quantization import Fp8Scheme, Quantization, ScaleShare
from photon_ext.weight import Weight
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat


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
        for name, finite in (("weight", numbers), (self.scheme.scale_name, scale.isfinite())):
            if not bool(finite.all()):
                raise ModelError(
                    f"{path}: {module}.{name} has values that are not finite; the file is damaged, "
                    "or was made of a model that is: download it again"
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


def module_reader(quantization: Quantization | None, module: str) -> ModuleReader:
    """Of a checkpoint whose `quantization_config` this is."""
    if quantization is not None and quantization.of(module) is not None:
        if isinstance(quantization, Fp8Scheme):
            return Fp8Reader(quantization)
        if isinstance(quantization, Int4Scheme):
            return Int4Reader(quantization)
    return PlainReader()
