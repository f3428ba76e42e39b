"""Weight: a matrix that linears multiply by, as their kernels read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, device

from photon_ext.weight_format import SCALE_BLOCK, WeightFormat


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k]: n outputs of k inputs each. Linears and `embedding_into` take one where they
    take a dense tensor.

    A number is rounded to float32 once (where its scale is divided, that was before), and then
    multiplied: `photon_ext.dequantize` has it.

    Attributes:
        data: DENSE: [n, k], of the dtype of the activations. FP8: float8_e4m3fn [n, k]; a NaN among
            them (0x7f, 0xff) is not looked for, and read as 480 or NaN. Else uint8 [n, bytes of a
            row]: k is whole blocks of the format. Of INT4, MXFP4 and NVFP4 the low four bits of a
            byte are an even column, the high ones the next.
        format: how the numbers lie in it.
        scale: what they are multiplied by; contiguous. FP8: float32 [n, 1], one a row; [n, ceil(k /
            128)], one for each 128 columns of a row; or [ceil(n / 128), ceil(k / 128)], one a block
            of 128 x 128. INT4 and INT8: float32, float16 or bfloat16 [n, groups], whose columns are
            a multiple of 32, or of 16. MXFP4: uint8 [n, k / 32], e8m0: 2^(byte - 127). NVFP4:
            float8_e4m3fn [n, k / 16]. Of the last two a NaN is not looked for: it is read as
            infinity, or 480. Else None.
        zero: of INT4, [n, groups], contiguous. uint8: a number is (bits - zero) * scale. Of the
            dtype of scale, float16 or bfloat16: what bits of 0 stand for, so that a number is bits
            * scale + zero. None: 8 is subtracted. Of INT8 there is none: 128 is.
        divisor: of MXFP4 and NVFP4, float32 [n, 1], contiguous: a number is e2m1 * (scale /
            divisor). It is the inverse of a global scale that multiplies. None: 1.
    """

    data: Tensor
    format: WeightFormat = WeightFormat.DENSE
    scale: Tensor | None = None
    zero: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def n(self) -> int:
        """Outputs."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        columns = self.data.shape[1]
        if self.format is WeightFormat.DENSE:
            return columns
        return columns // self.format.bytes * self.format.columns

    @property
    def device(self) -> device:
        return self.data.device

    @property
    def has_row_scales(self) -> bool:
        """Whether it is in fp8, with one scale a row."""
        scale = self.scale
        return self.format is WeightFormat.FP8 and scale is not None and scale.shape == (self.n, 1)

    def tensors(self) -> Iterator[Tensor]:
        """All that it is made of."""
        parts = (self.data, self.scale, self.zero, self.divisor)
        yield from (one for one in parts if one is not None)

    @property
    def nbytes(self) -> int:
        """Bytes as it is stored."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def split(self, rows: Sequence[int]) -> Iterator[Weight]:
        """Views of the first rows[0] outputs, then of the next. Of scales of blocks of rows each
        has its own: all but the last consist of whole blocks.
        """
        begin = 0
        for count in rows:
            yield self._rows(begin, count)
            begin += count

    def _rows(self, begin: int, count: int) -> Weight:
        of_scale = begin, count
        if self.scale is not None and len(self.scale) != self.n:
            of_scale = begin // SCALE_BLOCK, -(-count // SCALE_BLOCK)
        data = self.data.narrow(0, begin, count)
        scale = None if self.scale is None else self.scale.narrow(0, *of_scale)
        zero = None if self.zero is None else self.zero.narrow(0, *of_scale)
        divisor = None if self.divisor is None else self.divisor.narrow(0, begin, count)
        return Weight(data, self.format, scale, zero, divisor)
