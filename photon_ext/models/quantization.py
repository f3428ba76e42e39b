"""Quantization: how the weights of a model's modules are stored. Host data only, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Protocol

from photon_ext.errors import ConfigError
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class StoredFormat:
    """How a weight [n, k] lies in memory, with what `photon_ext.Weight` has beside its numbers.

    Attributes:
        rows, columns: that share a scale, where scales lie beside the numbers; None: all of a row.
        zeros: there are zero points.
        offsets: there are such, in the place of zero points, of the scales' dtype, which has 16
            bits then.
        divisors: there is one a row, that its scales are divided by.
        scale_dtype: by its name, as "float16".
    """

    format: WeightFormat
    rows: int = 1
    columns: int | None = None
    zeros: bool = False
    offsets: bool = False
    divisors: bool = False
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        """ConfigError: it has zero points and offsets, one of them is not of int4, or offsets are
        float32.
        """
        if self.zeros + self.offsets > (self.format is WeightFormat.INT4):
            raise ConfigError(
                f"StoredFormat: {self.format.value} with zeros={self.zeros} and "
                f"offsets={self.offsets}; int4 has one of them, or none, and others have none"
            )
        if self.offsets and self.scale_dtype == "float32":
            raise ConfigError(
                "StoredFormat: offsets of float32; give a scale_dtype of float16 or bfloat16"
            )

    @property
    def has_row_scales(self) -> bool:
        """Whether it is fp8, with one scale a row."""
        return self.format is WeightFormat.FP8 and self.rows == 1 and self.columns is None

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        return -(-n // self.rows), -(-k // (self.columns or k))

    def joins(self, rows: int) -> bool:
        """Whether the rows of another module may follow so many: no block has rows of both."""
        return rows % self.rows == 0


class Quantization(Protocol):
    """How a checkpoint, or whoever loads it, stores the weights of modules; str() says it."""

    def of(self, module: str) -> StoredFormat | None:
        """That of a linear, or of EMBEDDING, by its full name. None: in the dtype of the model."""


class ScaleShare(Enum):
    """What shares a scale of fp8; the values are those of compressed-tensors' `strategy`."""

    TENSOR = "tensor"
    ROW = "channel"
    BLOCK = "block"


_TITLES = {
    ScaleShare.TENSOR: "one a matrix",
    ScaleShare.ROW: "one a row",
    ScaleShare.BLOCK: f"one a block of {SCALE_BLOCK} x {SCALE_BLOCK}",
}


@dataclass(frozen=True)
class Fp8Scheme:
    """fp8 (e4m3) numbers of linears, and scales that they are multiplied by.

    Attributes:
        share: what shares a scale in the file. In memory rows do, where it is a matrix.
        scale_name: of a module's scales: "weight_scale_inv" of Qwen's and DeepSeek's files, which
            multiplies in spite of its name, or "weight_scale" of compressed-tensors.
        left_out: modules whose weights have the dtype of the model: regular expressions that match
            the whole of their names.
    """

    share: ScaleShare
    scale_name: str
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"fp8 weights, scales {_TITLES[self.share]}"

    def of(self, module: str) -> StoredFormat | None:
        if module == EMBEDDING or is_left_out(module, self.left_out):
            return None
        if self.share is ScaleShare.BLOCK:
            return StoredFormat(WeightFormat.FP8, SCALE_BLOCK, SCALE_BLOCK)
        return StoredFormat(WeightFormat.FP8)


@dataclass(frozen=True)
class Fp4Scheme:
    """Numbers of four bits (e2m1) of linears, and a scale of eight bits for each block of a row.

    Attributes:
        format: MXFP4 or NVFP4.
        left_out: modules whose weights have the dtype of the model: regular expressions that match
            the whole of their names.
        divides: in memory the scales of a row are divided by a float32. In files of NVFP4 those of
            a matrix are.
    """

    format: WeightFormat
    left_out: tuple[str, ...] = ()
    divides: bool = False

    def __str__(self) -> str:
        columns = self.format.columns
        return f"{self.format.value} weights, scales one for {columns} columns of a row"

    def of(self, module: str) -> StoredFormat | None:
        if module == EMBEDDING or is_left_out(module, self.left_out):
            return None
        dtype = "uint8" if self.format is WeightFormat.MXFP4 else "float8_e4m3fn"
        columns = self.format.columns
        return StoredFormat(self.format, columns=columns, divisors=self.divides, scale_dtype=dtype)


@dataclass(frozen=True)
class ModuleFormats:
    """Each module by its own: the blocks of a GGUF file, or what weights are rounded to.

    Attributes:
        formats: of modules by their names, where it is not the model's dtype.
    """

    formats: Mapping[str, StoredFormat] = field(hash=False)

    def __str__(self) -> str:
        names = {one.format.value for one in self.formats.values()}
        return f"weights in {', '.join(sorted(names))}"

    def of(self, module: str) -> StoredFormat | None:
        return self.formats.get(module)


def is_left_out(module: str, patterns: tuple[str, ...]) -> bool:
    return any(_compiled(one).fullmatch(module) for one in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """re itself keeps no more than some hundred, and a checkpoint may name each of its modules."""
    return re.compile(pattern)
