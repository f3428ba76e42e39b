"""The rotary settings of a Hugging Face config.json."""

from __future__ import annotations

import math
from typing import NamedTuple

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import RopeScaling, RopeScalingKind
from photon_ext.models.loading.config_reader import MAX_POSITIONS, ConfigReader


class RotaryDefaults(NamedTuple):
    """What transformers knows of a family's rotation where its config.json does not say it."""

    theta: float = 10000.0
    partial: bool = False  # `partial_rotary_factor` counts


class Rotary(NamedTuple):
    """As the fields of ModelConfig."""

    theta: float
    dims: int | None
    scaling: RopeScaling


def hf_rotary(
    fields: ConfigReader, known: RotaryDefaults, head_dim: int, max_positions: int, source: str
) -> Rotary:
    """Older files keep theta and the rotated part of heads beside `rope_scaling`, newer ones inside
    `rope_parameters`.

    In a file with both `rope_scaling` counts, as in transformers: it was added by hand to a newer
    file. Raises ModelError, naming `source`, for what is not supported, and for damage.
    """
    rope = (
        fields.object("rope_scaling")
        or fields.object("rope_parameters")
        or ConfigReader({}, source)
    )
    theta = rope.number("rope_theta", fields.number("rope_theta", known.theta))
    within = rope if rope.get("partial_rotary_factor") is not None else fields
    dims = int(head_dim * within.number("partial_rotary_factor", 1.0))
    if dims != head_dim and not known.partial:
        raise ModelError(
            f"{source}: partial_rotary_factor is not 1; rotary embeddings over a part of the "
            "head are not supported for this family"
        )
    if dims != head_dim and (dims % 2 or not 0 < dims < head_dim):
        within.refuse("partial_rotary_factor", f"an even number of the {head_dim} of a head")
    scaling = _scaling(rope, fields, dims, max_positions, source)
    return Rotary(theta, dims if dims < head_dim else None, scaling)


def _scaling(
    rope: ConfigReader, fields: ConfigReader, dims: int, max_positions: int, source: str
) -> RopeScaling:
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name == "default":
        return RopeScaling()
    if name == "linear":
        return RopeScaling(RopeScalingKind.LINEAR, factor=rope.number("factor"))
    if name == "llama3":
        return _llama3(rope, fields, max_positions)
    if name in ("longrope", "su"):
        return _longrope(rope, fields, dims, max_positions)
    raise ModelError(
        f"{source}: rope scaling {shown(name)} is not supported; supported are 'default', "
        "'linear', 'llama3' and 'longrope'"
    )


def _llama3(rope: ConfigReader, fields: ConfigReader, max_positions: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        rope.refuse("low_freq_factor", f"a number below high_freq_factor, which is {high}")
    original = _trained_positions(rope, fields, max_positions)
    return RopeScaling(RopeScalingKind.LLAMA3, rope.number("factor"), low, high, original)


def _longrope(
    rope: ConfigReader, fields: ConfigReader, dims: int, max_positions: int
) -> RopeScaling:
    """Where the file does not say by what cos and sin are multiplied, it follows from how much
    longer than the trained context texts may be (Ding et al., "LongRoPE", 2024).
    """
    short, long = (rope.numbers(key, dims // 2) for key in ("short_factor", "long_factor"))
    original = _trained_positions(rope, fields, None)
    stretch = rope.number("factor", max_positions / original)
    amplitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeScaling(
        RopeScalingKind.LONGROPE,
        original_max_positions=original,
        factors=short,
        long_factors=long,
        amplitude=rope.number("attention_factor", amplitude),
    )


def _trained_positions(rope: ConfigReader, fields: ConfigReader, default: int | None) -> int:
    """The trained context stands in `rope`.

    Where it stands in the file itself too, that counts, as in transformers.
    """
    within = fields if fields.get("original_max_position_embeddings") is not None else rope
    return within.positive("original_max_position_embeddings", default, most=MAX_POSITIONS)
