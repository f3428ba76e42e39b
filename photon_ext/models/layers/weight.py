"""Weights of a model without values, and what a loader fills of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from photon_ext.models.quantization import StoredFormat
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat


def empty_weight(
    n: int, k: int, stored: StoredFormat | None, empty: Callable[..., torch.Tensor]
) -> Weight:
    """[n, k]; `empty(*shape)` makes tensors of the dtype of the model."""
    if stored is None:
        return Weight(empty(n, k))
    form = stored.format
    dtype = torch.float8_e4m3fn if form is WeightFormat.FP8 else torch.uint8
    data = empty(n, form.row_bytes(k), dtype=dtype)
    if not form.has_scales:
        return Weight(data, form)
    shape = stored.scale_shape(n, k)
    scale = empty(*shape, dtype=getattr(torch, stored.scale_dtype))
    zero = None
    if stored.zeros or stored.offsets:
        zero = empty(*shape, dtype=torch.uint8 if stored.zeros else scale.dtype)
    divisor = empty(n, 1, dtype=torch.float32) if stored.divisors else None
    return Weight(data, form, scale, zero, divisor)


def named_tensors(module: str, weight: Weight) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a module's weight."""
    yield f"{module}.weight", weight.data
    if weight.scale is not None:
        yield f"{module}.weight_scale", weight.scale
    if weight.zero is not None:
        yield f"{module}.weight_zero", weight.zero
    if weight.divisor is not None:
        yield f"{module}.weight_divisor", weight.divisor
