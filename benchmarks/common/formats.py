"""A model in the formats that weights may have, made of the same model as it was loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.common.options import DTYPES
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.placing import place
from photon_ext.models.requantize import requantized
from photon_ext.models.weights import (
    DecoderWeights,
    empty_weights,
    other_slots,
    weight_modules,
)

ROUNDED = ("fp8", "int4")
FORMATS = (*DTYPES, *ROUNDED)


class Candidate(NamedTuple):
    """A model to compare with the one that it was made of."""

    config: ModelConfig
    weights: DecoderWeights


def in_format(name: str, config: ModelConfig, weights: DecoderWeights) -> Candidate:
    """The model in a format of FORMATS. A name of DTYPES: all of it in that dtype; "fp8" and
    "int4": as `quantize=` has it, and what is not rounded in bfloat16.
    """
    if DTYPES.get(name) is weights.dtype:
        return Candidate(config, weights)
    dtype = DTYPES.get(name, torch.bfloat16)
    config = requantized(config, name if name in ROUNDED else "none")
    return Candidate(config, converted(config, weights, dtype))


def converted(config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """The same parameters as `config` stores them, and in `dtype`."""
    made = empty_weights(config, dtype, weights.device)
    modules = zip(weight_modules(made), weight_modules(weights), strict=True)
    for (module, slot), (_, weight) in modules:
        place(slot, weight, module)
    for (_, to), (_, values) in zip(other_slots(made), other_slots(weights), strict=True):
        to.copy_(values)
    bias = weights.head.bias
    return made if bias is None else replace(made, head=replace(made.head, bias=bias.to(dtype)))
