"""Models to measure: random weights of a named shape, or a real model from disk."""

from __future__ import annotations

import torch

from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loader import load_model
from photon_ext.models.shapes import NAMED_SHAPES
from photon_ext.models.weights import DecoderWeights, random_weights

TINY = ModelConfig(
    family=Family.QWEN3,
    hidden=64,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=256,
    tied_embeddings=True,
)
SHAPES = {"tiny": TINY, **NAMED_SHAPES}


def open_model(
    name: str, dtype: torch.dtype | None, device: torch.device
) -> tuple[ModelConfig, DecoderWeights]:
    """Random weights for a name in SHAPES, made on `device` (dtype None: bfloat16); anything
    else is loaded as a model.
    """
    if name in SHAPES:
        config = SHAPES[name]
        return config, random_weights(config, dtype or torch.bfloat16, device)
    loaded = load_model(name, dtype, device)
    return loaded.config, loaded.weights
