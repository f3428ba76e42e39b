"""regrouped: the blocks of a GGUF file as groups of integers, which the Hopper kernels read."""

from __future__ import annotations

import torch

from photon_ext.block_codes import BlockCodes, block_codes
from photon_ext.errors import ModelError
from photon_ext.models.requantize import GROUPED
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat

_MIDDLE = 128  # the code of 0 in int8


def regrouped(weight: Weight, first: int = 0) -> Weight:
    """The same codes in the format that GROUPED names, where the weight is. Its scales and offsets
    are those of the file, each rounded to float16 once.

    `first`: the number of the first row, for errors. ModelError: a scale or offset is too large.
    """
    form, found = GROUPED[weight.format].format, block_codes(weight)
    data = _pairs(found) if form is WeightFormat.INT4 else _bytes(found)
    scale = _halves(found.scale, "scale", first)
    offset = None if found.offset is None else _halves(found.offset, "offset", first)
    return Weight(data, form, scale, offset)


def _pairs(found: BlockCodes) -> torch.Tensor:
    """Two codes a byte, the even column in the low bits."""
    codes = found.codes.flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _bytes(found: BlockCodes) -> torch.Tensor:
    return found.codes.flatten(1) + (_MIDDLE - found.middle)


def _halves(factors: torch.Tensor, what: str, first: int) -> torch.Tensor:
    """As float16, [n, groups]."""
    halves = factors.squeeze(-1).half()
    infinite = halves.isinf()
    if bool(infinite.any()):
        row = int(infinite.any(dim=1).nonzero()[0])
        number = float(factors[row][infinite[row]][0])
        raise ModelError(
            f"row {first + row} has a block with the {what} {number:.6g}, which float16 does not "
            'hold; load it with quantize="none", or "fp8"'
        )
    return halves
