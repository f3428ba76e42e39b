"""Quantization: how a checkpoint stores the weights of its linears. Host data only, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from photon_ext.errors import ModelError

SCALE_BLOCK = 128  # rows, and columns, of a block: kScaleBlock of csrc/common/weight.h


class ScaleShare(Enum):
    """What shares a scale; the values are those of compressed-tensors' `strategy`."""

    TENSOR = "tensor"
    ROW = "channel"
    BLOCK = "block"


_TITLES = {
    ScaleShare.TENSOR: "one a matrix",
    ScaleShare.ROW: "one a row",
    ScaleShare.BLOCK: f"one a block of {SCALE_BLOCK} x {SCALE_BLOCK}",
}


@dataclass(frozen=True)
class Quantization:
    """fp8 (e4m3) numbers, and scales that they are multiplied by.

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

    def covers(self, modules: Sequence[str]) -> bool:
        """Whether the modules of a projection, by their full names, are stored so. ModelError: some
        are and some are not.
        """
        out = [any(re.fullmatch(one, module) for one in self.left_out) for module in modules]
        if any(out) and not all(out):
            plain, stored = modules[out.index(True)], modules[out.index(False)]
            raise ModelError(
                f"quantization_config leaves out {plain!r} and not {stored!r}, which are one "
                "matrix here; use a checkpoint that stores both alike"
            )
        return not any(out)

    def file_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Of the scales of a module [n, k] in a file; of a single one the shape does not matter."""
        if self.share is ScaleShare.TENSOR:
            return (1, 1)
        return (n, 1) if self.share is ScaleShare.ROW else (_blocks(n), _blocks(k))

    def scale_shape(self, rows: Sequence[int], k: int) -> tuple[int, int]:
        """Of the scales in memory of modules [rows[i], k], one below the other. Blocks of rows stay
        such where none holds rows of two modules; else each row has its scales.
        """
        n = sum(rows)
        if self.share is not ScaleShare.BLOCK:
            return n, 1
        whole = all(count % SCALE_BLOCK == 0 for count in rows[:-1])
        return _blocks(n) if whole else n, _blocks(k)


def _blocks(size: int) -> int:
    return -(-size // SCALE_BLOCK)
