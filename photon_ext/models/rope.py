"""cos/sin tables of the rotary position embedding, with the ways in which models stretch it.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import ModelConfig, RopeScaling, RopeScalingKind


def inverse_frequencies(config: ModelConfig, max_len: int = 1) -> torch.Tensor:
    """float32 [rotated / 2]: radians per position of each pair, as `config.rope_scaling` says for
    texts of up to `max_len` positions.

    The order of float32 operations follows Hugging Face's, so that tables agree to the last bit.
    They run on the CPU, whatever the caller has made torch's default device.
    """
    exponents = (
        torch.arange(0, config.rotated, 2, dtype=torch.int64, device="cpu").float() / config.rotated
    )
    powers = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling.kind is RopeScalingKind.LONGROPE:
        is_long = max_len > scaling.original_max_positions
        factors = scaling.long_factors if is_long else scaling.factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    frequencies = 1.0 / powers
    if scaling.kind is RopeScalingKind.LINEAR:
        return frequencies / scaling.factor
    if scaling.kind is RopeScalingKind.FACTORS:
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32, device="cpu")
    if scaling.kind is RopeScalingKind.LLAMA3:
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Short wavelengths stay, long ones are divided by the factor, others are interpolated."""
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > low_wavelength, frequencies / scaling.factor, frequencies)
    smooth = scaling.original_max_positions / wavelength - scaling.low_freq_factor
    smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(is_between, between, scaled)


def rope_tables(
    config: ModelConfig, max_len: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_len, head_dim] each, on `device`.

    Both halves of a row repeat the same values. Pairs that are not rotated come last in them: those
    of a rotated part are moved there as weights are loaded (loading/folding.py). A model with
    LongRoPE has one table for all lengths, by `max_len`: keys of both would not fit together.

    Raises:
        ModelError: an angle is beyond float32, by a theta or factors that no model has.
    """
    positions = torch.arange(max_len, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * inverse_frequencies(config, max_len)[None, :]
    if not bool(angles.isfinite().all()):
        raise ModelError(
            f"{config.source}: rope_theta {config.rope_theta} and {shown(config.rope_scaling)} "
            "make "
            f"angles beyond float32 at {max_len} positions; the config file is damaged"
        )
    amplitude, still = config.rope_scaling.amplitude, (config.head_dim - config.rotated) // 2
    cos = nn.functional.pad(angles.cos() * amplitude, (0, still), value=1.0)
    sin = nn.functional.pad(angles.sin() * amplitude, (0, still))
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((sin, sin), dim=-1).to(device)


def table_bytes(config: ModelConfig, max_len: int) -> int:
    """Memory of the tables of all layers: layers that rotate share one pair, and so do others."""
    kinds = {index in config.unrotated for index in range(config.layers)}
    return len(kinds) * 2 * max_len * config.head_dim * torch.float32.itemsize


def identity_tables(
    config: ModelConfig, max_len: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rope_tables`, of layers that do not rotate: every angle is zero."""
    shape = max_len, config.head_dim
    cos = torch.ones(shape, dtype=torch.float32, device=device)
    return cos, torch.zeros_like(cos)
