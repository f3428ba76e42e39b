"""The model that the ladder runs: a transformers model with random weights of a named shape."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common.checkpoint import transformers_model
from benchmarks.common.models import SHAPES
from benchmarks.common.result import BenchmarkError
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots


def build_model(name: str, dtype: torch.dtype, device: torch.device, max_len: int) -> Any:
    """Raises BenchmarkError for an unknown name, or more positions than the model has."""
    if name not in SHAPES:
        raise BenchmarkError(f"--model {name!r} is unknown; use one of {', '.join(SHAPES)}")
    config = SHAPES[name]
    if max_len > config.longest:
        made_for = f"{name} was made for {config.longest}; ask for fewer"
        raise BenchmarkError(f"prompt and tokens are {max_len} positions, {made_for}")
    return transformers_model(config, spread_weights(config, dtype, device))


def spread_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> DecoderWeights:
    """Random weights whose greedy tokens vary, so that equal tokens show something.

    The first layer's attention is sharp, so that the next token hangs on the whole history. That
    of every layer would make a rounding error grow a thousandfold through 28 layers, and float32
    would no longer decide between near-ties.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    sharpened = ("q_norm", "k_norm") if config.qk_norm else ("q_proj", "k_proj")
    for name, slot in weight_slots(weights):
        if name.endswith("norm.weight"):
            slot.normal_(1.0, 0.2, generator=generator)
        else:
            slot.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)
        if name in [f"model.layers.0.self_attn.{each}.weight" for each in sharpened]:
            slot.mul_(4.0)
    return weights
