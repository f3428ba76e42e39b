"""WeightFormat: how the numbers of a weight lie in memory. Host data only, no torch."""

from __future__ import annotations

from enum import Enum

from photon_ext import _C

FP8_MOST = 448.0  # of float8_e4m3fn
SCALE_BLOCK = 128  # rows, and columns, of a block of fp8 with one scale: kScaleBlock of weight.h


class WeightFormat(Enum):
    """A row is a sequence of blocks, of so many columns in so many bytes; what a block holds is
    said in csrc/common/weight.h. From Q4_0 on they are those of GGUF files, each with its scales.

    Attributes:
        code: what ops know it by.
        columns, bytes: of a block; of DENSE they mean nothing.
    """

    DENSE = "dense"
    FP8 = "fp8"
    INT4 = "int4"
    INT8 = "int8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    code: int
    columns: int
    bytes: int

    def __init__(self, name: str) -> None:
        self.code, self.columns, self.bytes = _C.weight_formats()[name]

    @property
    def has_scales(self) -> bool:
        """Whether they lie beside the numbers."""
        return self is WeightFormat.FP8 or self.is_int or self.is_fp4

    @property
    def is_int(self) -> bool:
        """Whether the numbers are integers, and so many columns share a scale."""
        return self in (WeightFormat.INT4, WeightFormat.INT8)

    @property
    def is_fp4(self) -> bool:
        """Whether the numbers are e2m1, and their scales a byte each."""
        return self in (WeightFormat.MXFP4, WeightFormat.NVFP4)

    def row_bytes(self, k: int) -> int:
        """Of k columns, which are whole blocks."""
        return k // self.columns * self.bytes
