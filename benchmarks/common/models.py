"""Models to measure: random weights of a named shape, or a real model from disk."""

from __future__ import annotations

import torch

from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.loader import load_model
from photon_ext.models.requantize import in_groups, requantized
from photon_ext.models.shapes import NAMED_SHAPES, in_fp8, in_q4_k_m, in_q8_0
from photon_ext.models.weights import DecoderWeights, random_weights

TINY = ModelConfig(Family.QWEN3, 64, 2, 4, 2, 16, 96, 256, tied_embeddings=True)
# The shape of SmolLM2-135M, which a CPU decodes in some milliseconds a step.
SMALL = ModelConfig(Family.LLAMA, 576, 30, 9, 3, 64, 1536, 49152, tied_embeddings=True)
FP8 = {f"{name}-fp8": in_fp8(one) for name, one in NAMED_SHAPES.items() if "qwen3" in name}
# GGUF files as a GPU keeps them
GGUF = {
    f"{name}-{kind.__name__.removeprefix('in_')}": in_groups(kind(one))
    for name, one in NAMED_SHAPES.items()
    if "qwen3" in name
    for kind in (in_q4_k_m, in_q8_0)
}
SHAPES = {"tiny": TINY, "small": SMALL, **NAMED_SHAPES, **FP8, **GGUF}


def open_model(
    name: str, dtype: torch.dtype | None, device: torch.device, quantize: str | None = None
) -> tuple[ModelConfig, DecoderWeights]:
    """Random weights for a name in SHAPES, made on `device` (dtype None: bfloat16), else a model
    from disk; `quantize`: how weights lie in memory, as load_model takes it."""
    if name in SHAPES:
        config = requantized(SHAPES[name], quantize)
        return config, random_weights(config, dtype or torch.bfloat16, device)
    loaded = load_model(name, dtype, device, quantize)
    return loaded.config, loaded.weights
