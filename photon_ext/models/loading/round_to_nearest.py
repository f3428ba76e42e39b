"""Weights of a linear in fewer bits: each number becomes the nearest that the format has.

No data is looked at but the weight itself. The scale of a share is that of its number of the
largest magnitude, which so becomes the last number of the format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from photon_ext.errors import ConfigError, ModelError
from photon_ext.weight_format import FP8_MOST

INT4_LEAST, INT4_MOST = -8, 7
INT4_GROUP = 128  # columns that share a scale
_LEAST_SCALE = 2.0**-126  # float32 has no smaller normal number
_FLOAT16_STEP = 2.0**-24  # the smallest number above 0, and the step of those below 2^-14
_BLOCK = 1 << 22  # numbers that are worked on at a time


def fp8_rows(weight: torch.Tensor, first_row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers data * scale, data float8_e4m3fn [n, k] and scale float32 [n, 1], of a weight
    [n, k] of any float dtype, on its device. The largest magnitude of a row is 448 times its scale.
    `first_row`: what messages call its first row.

    Raises:
        ConfigError: the weight is no matrix of floats.
        ModelError: it has a number that is not finite.
    """
    data = torch.empty(_checked_shape(weight), dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), 1, device=weight.device)
    for rows, numbers in _blocks(weight, first_row):
        largest = numbers.abs().amax(1, keepdim=True)
        scale[rows] = (largest / FP8_MOST).clamp(min=_LEAST_SCALE)
        data[rows] = (numbers / scale[rows]).clamp(-FP8_MOST, FP8_MOST).to(data.dtype)
    return data, scale


def int4_groups(
    weight: torch.Tensor, group: int = INT4_GROUP, first_row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Four bits for each number of a weight [n, k] of any float dtype, and a scale for each `group`
    of consecutive columns of a row, on the weight's device.

    Column c of a row stands for (nibble - 8) * scale, with its nibble in byte c // 2 of the row:
    the low four bits where c is even, the high four where it is odd. The number of the largest
    magnitude in a group is -8 times the scale, so that all 16 values are used. So a scale is
    negative where that number is positive. `first_row`: as in fp8_rows.

    Returns:
        data uint8 [n, k // 2], and scale float16 [n, k // group].

    Raises:
        ConfigError: the weight is no matrix of floats, or `group` is not even or does not divide k.
        ModelError: it has a number that is not finite, or too large for a scale in float16.
    """
    n, k = _checked_shape(weight)
    if group < 2 or group % 2 or k % group:
        raise ConfigError(
            f"int4: the weight has {k} columns, which are not whole groups of {group}; groups are "
            "of an even number of columns that divides those of the weight, or leave it as it is"
        )
    data = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(n, k // group, dtype=torch.float16, device=weight.device)
    for rows, numbers in _blocks(weight, first_row):
        groups = numbers.unflatten(1, (-1, group))
        scale[rows] = _int4_scales(groups)
        codes = (groups / scale[rows].float().unsqueeze(-1)).round_()
        codes = codes.clamp_(INT4_LEAST, INT4_MOST).sub_(INT4_LEAST).to(torch.uint8).flatten(1)
        data[rows] = codes[:, 0::2] | codes[:, 1::2] << 4
    return data, scale


def _int4_scales(groups: torch.Tensor) -> torch.Tensor:
    """float16 [rows, groups] of numbers [rows, groups, columns]."""
    place = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, place).squeeze(-1)
    scale = (largest / INT4_LEAST).half()
    if not bool(scale.isfinite().all()):
        most = float(largest.abs().max())
        raise ModelError(
            f"int4: the weight has a number of magnitude {most:.3g}, and scales in float16 reach "
            f"{-INT4_LEAST * torch.finfo(torch.float16).max:.0f}; leave this weight as it is"
        )
    # The nearest of the smallest scales may be too small, by which the largest number is cut.
    cut = (largest.abs() > (0.5 - INT4_LEAST) * scale.abs().float()) | (scale == 0)
    step = torch.copysign(torch.full_like(scale, _FLOAT16_STEP), scale)
    return torch.where(cut, scale + step, scale)


def _checked_shape(weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ConfigError(
            f"a weight to be rounded is {weight.dtype} {list(weight.shape)}, expected a matrix "
            "[n, k] of floats"
        )
    n, k = weight.shape
    return n, k


def _blocks(weight: torch.Tensor, first_row: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows after the other, in float32. ModelError: one has a number that is not finite."""
    each = max(1, _BLOCK // weight.shape[1])
    for first, part in zip(range(0, len(weight), each), weight.split(each), strict=True):
        numbers = part.float()
        if not bool(numbers.isfinite().all()):
            row, column = (~numbers.isfinite()).nonzero()[0].tolist()
            raise ModelError(
                f"the weight is {float(numbers[row, column])} at row {first_row + first + row}, "
                f"column {column}; numbers that are not finite cannot be rounded: the file is "
                "damaged, or was made of a model that is"
            )
        yield slice(first, first + len(part)), numbers
