"""What some rows ask of a step that the others do not: flags, which are part of its graph's key."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntFlag
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_ext.runtime.row import Row


class StepFeatures(IntFlag):
    """Steps in which a row has a feature are graphs of their own, so that the others cost what they
    do without. A new one is a flag here, asked for in `features_of` and `features_with`, and read
    from `StepTensors.features` by the forward.
    """

    NONE = 0
    SPATIAL = 1  # a row's answer is objects
    LORA = 2  # a row has an adapter


_SPATIAL, _LORA = int(StepFeatures.SPATIAL), int(StepFeatures.LORA)
_SUBSETS = tuple(StepFeatures(bits) for bits in range(2 * max(StepFeatures)))


def features_of(row: Row) -> int:
    """What a row asks of its steps. Plain bits: to join flags takes half a microsecond, and a batch
    has hundreds of rows.
    """
    return (row.lora_slot and _LORA) | (row.params.object_values and _SPATIAL)


def features_with(lora_slots: int, value_ids: int) -> StepFeatures:
    """What rows may ask for where there are so many adapters and values, see Pipeline."""
    return joined(((lora_slots and _LORA), (value_ids and _SPATIAL)))


def joined(bits: Iterable[int]) -> StepFeatures:
    """All features of these."""
    joint = 0
    for one in bits:
        joint |= one
    return _SUBSETS[joint]


def subsets(features: StepFeatures) -> list[StepFeatures]:
    """NONE, and every other choice of some of these features, ascending."""
    return [_SUBSETS[bits] for bits in range(features + 1) if not bits & ~int(features)]
