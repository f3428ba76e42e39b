"""Weights with scales, as the files of a checkpoint store them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from photon_ext.errors import ModelError
from photon_ext.models.quantization import SCALE_BLOCK, Quantization, ScaleShare

_PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes, as safetensors calls them
FP8 = ("F8_E4M3",)
_NAN = 0x7F  # an e4m3 of these bits is none, whatever its sign


class Expected(NamedTuple):
    """A tensor as a file must have it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _PLAIN
    is_scale: bool = False

    def has(self, shape: list[int]) -> bool:
        """Whether a tensor of this shape is it. Of scales, dimensions of 1 do not count."""
        if not self.is_scale:
            return tuple(shape) == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


def expected_tensors(
    slots: Mapping[str, torch.Tensor], quantization: Quantization | None
) -> dict[str, Expected]:
    """What the files must have for these slots of weights, by name."""
    expected = {}
    for name, slot in slots.items():
        module, _, kind = name.rpartition(".")
        if slot.dtype is torch.float8_e4m3fn:
            expected[name] = Expected(tuple(slot.shape), FP8)
        elif quantization is not None and kind == quantization.scale_name:
            n, k = slots[f"{module}.weight"].shape
            expected[name] = Expected(quantization.file_shape(n, k), is_scale=True)
        else:
            expected[name] = Expected(tuple(slot.shape))
    return expected


def checked_values(
    path: Path,
    name: str,
    tensor: torch.Tensor,
    slot: torch.Tensor,
    scales: Quantization | None,
) -> torch.Tensor:
    """What a slot gets of a tensor that a file stores for it. `scales`: it is the scales of a
    module. ModelError: it has values that no kernel looks for.
    """
    if tensor.dtype is torch.float8_e4m3fn:
        finite = bool(((tensor.view(torch.uint8) & _NAN) != _NAN).all())
    else:
        finite = scales is None or bool(tensor.isfinite().all())
    if not finite:
        raise ModelError(
            f"{path}: {name} has values that are not finite; the file is damaged, or was made of a "
            "model that is: download it again"
        )
    return tensor if scales is None else _spread(tensor, slot.shape, scales)


def _spread(scales: torch.Tensor, shape: torch.Size, quantization: Quantization) -> torch.Tensor:
    """[n, columns] or, where blocks stay blocks, as it is."""
    rows, columns = shape
    scales = scales.float().reshape(-1, columns)
    if len(scales) == rows:
        return scales
    each = SCALE_BLOCK if quantization.share is ScaleShare.BLOCK else rows
    return scales.repeat_interleave(each, 0)[:rows]
