"""place: a weight of a file into its slot of a model, which may be stored otherwise."""

from __future__ import annotations

import torch

from photon_ext import ops
from photon_ext.errors import ModelError
from photon_ext.models.loading.regroup import regrouped
from photon_ext.models.loading.round_to_nearest import fp8_rows, int4_groups
from photon_ext.models.requantize import GROUPED
from photon_ext.weight import Weight
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat

_NUMBERS = 1 << 20  # that are converted at a time
_NEAR = 2.0**-10  # twice what scales lose that are rounded to float16


def place(slot: Weight, weight: Weight, source: str) -> None:
    """Copies it where the slot is stored alike, or takes its codes regrouped; else its numbers are
    converted to the slot's dtype, or rounded to the nearest that the slot's format has. `source`:
    the file and the tensor.

    ModelError: a number cannot be rounded so, or nothing is rounded to such a slot.
    """
    if _kind(slot) == _kind(weight) and _keeps_scales(slot, weight):
        _copy(slot, weight)
        return
    if not _takes_codes(slot, weight) and not _takes_numbers(slot):
        found, wanted = _told(weight), _told(slot)
        raise ModelError(
            f"{source} is stored as {found}, which does not become {wanted}; load it with "
            'quantize="none", or "fp8"'
        )
    # Some rows after the other: the whole in float32 is eight times as large as four bits.
    each = max(_NUMBERS // slot.k // SCALE_BLOCK, 1) * SCALE_BLOCK
    firsts = range(0, slot.n, each)
    rows = [min(each, slot.n - first) for first in firsts]
    for first, to, part in zip(firsts, slot.split(rows), weight.split(rows), strict=True):
        try:
            _convert(to, part, first)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from error


def _convert(slot: Weight, weight: Weight, first: int) -> None:
    """`first`: the number of the first row."""
    if slot.format is WeightFormat.DENSE:
        _write_numbers(slot.data, weight)
        return
    if _takes_codes(slot, weight):
        _copy(slot, regrouped(_moved(weight, slot.device), first))
        return
    numbers = torch.empty(slot.n, slot.k, device=slot.device)
    _write_numbers(numbers, weight)
    data, scale = _rounded(slot, numbers, first)
    assert slot.scale is not None
    slot.data.copy_(data)
    slot.scale.copy_(scale)


def _write_numbers(to: torch.Tensor, weight: Weight) -> None:
    """Those of a weight of any format, decoded where `to` [n, k] is."""
    if weight.format is WeightFormat.DENSE:
        to.copy_(weight.data)
        return
    ops.dequantize_into(to, _moved(weight, to.device))


def _moved(weight: Weight, device: torch.device) -> Weight:
    """To where its numbers are made: fewer bits move sooner."""
    parts = (weight.data, weight.scale, weight.zero, weight.divisor)
    data, *others = (None if one is None else one.to(device).contiguous() for one in parts)
    assert data is not None
    return Weight(data, weight.format, *others)


def _copy(slot: Weight, weight: Weight) -> None:
    for tensor, stored in zip(slot.tensors(), weight.tensors(), strict=True):
        tensor.copy_(stored)


def _takes_codes(slot: Weight, weight: Weight) -> bool:
    """Whether the slot has the format that a block's codes are regrouped to."""
    grouped = GROUPED.get(weight.format)
    if grouped is None or slot.format is not grouped.format or slot.scale is None:
        return False
    offsets = None if slot.zero is None else slot.zero.dtype
    wanted = torch.float16 if grouped.offsets else None
    return offsets is wanted and slot.scale.shape == grouped.scale_shape(slot.n, slot.k)


def _takes_numbers(slot: Weight) -> bool:
    """Whether numbers are converted or rounded to it: dense, fp8 by rows, or int4 without zeros."""
    if slot.format is WeightFormat.FP8:
        return slot.scale is not None and slot.scale.shape == (slot.n, 1)
    return slot.format is WeightFormat.DENSE or (
        slot.format is WeightFormat.INT4 and slot.zero is None
    )


def _told(weight: Weight) -> str:
    """Its format, and the dtypes of what lies beside its numbers."""
    parts = {"scales": weight.scale, "zeros": weight.zero}
    beside = [f"{name} {str(one.dtype)[6:]}" for name, one in parts.items() if one is not None]
    return f"{weight.format.value} ({', '.join(beside)})" if beside else weight.format.value


def _kind(weight: Weight) -> object:
    """What two weights have in common whose tensors mean the same."""
    zeros = None if weight.zero is None else weight.zero.dtype
    return weight.format, zeros, [part.shape for part in weight.tensors()]


def _keeps_scales(slot: Weight, weight: Weight) -> bool:
    """Whether none of its scales overflows or becomes small in the slot's dtype."""
    if slot.scale is None or weight.scale is None or slot.scale.dtype is weight.scale.dtype:
        return True
    kept, scale = weight.scale.to(slot.scale.dtype).float(), weight.scale.float()
    return torch.allclose(kept, scale, rtol=_NEAR, atol=0)


def _rounded(slot: Weight, numbers: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert slot.scale is not None
    if slot.format is WeightFormat.FP8:
        return fp8_rows(numbers, first)
    return int4_groups(numbers, slot.k // slot.scale.shape[1], first)
