"""Shapes of published models, for benchmarks with random weights and `photon-ext info --plan`."""

from __future__ import annotations

from collections.abc import Mapping

from photon_ext.models.config import Family, ModelConfig, RopeScaling, RopeScalingKind

_LLAMA32_SCALING = RopeScaling(RopeScalingKind.LLAMA3, 32.0, 1.0, 4.0, 8192)


def _qwen3(hidden: int, layers: int, q_heads: int, intermediate: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family=Family.QWEN3,
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=151936,
        rope_theta=1e6,
        tied_embeddings=tied,
        max_positions=40960,
        eos_ids=(151645, 151643),
    )


NAMED_SHAPES: Mapping[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "llama-3.2-1b": ModelConfig(
        family=Family.LLAMA,
        hidden=2048,
        layers=16,
        q_heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=128256,
        rms_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA32_SCALING,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(128001,),
    ),
    "qwen2.5-0.5b": ModelConfig(
        family=Family.QWEN2,
        hidden=896,
        layers=24,
        q_heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
        vocab=151936,
        rope_theta=1e6,
        tied_embeddings=True,
        qkv_bias=True,
        max_positions=32768,
        eos_ids=(151645, 151643),
    ),
    "mistral-7b": ModelConfig(
        family=Family.MISTRAL,
        hidden=4096,
        layers=32,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32768,
        rms_eps=1e-5,
        rope_theta=1e6,
        max_positions=32768,
        eos_ids=(2,),
    ),
    "granite-3.1-2b": ModelConfig(
        family=Family.GRANITE,
        hidden=2048,
        layers=40,
        q_heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=49155,
        rms_eps=1e-5 / 12**2,
        rope_theta=5e6,
        attention_scale=0.015625,
        residual_multiplier=0.22 / 12,
        logits_divisor=8.0,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(0,),
    ),
    "smollm3-3b": ModelConfig(
        family=Family.SMOLLM3,
        hidden=2048,
        layers=36,
        q_heads=16,
        kv_heads=4,
        head_dim=128,
        intermediate=11008,
        vocab=128256,
        rope_theta=5e6,
        unrotated=tuple(range(3, 36, 4)),
        tied_embeddings=True,
        max_positions=65536,
        eos_ids=(128012,),
    ),
    # Without LongRoPE's 96 divisors, which change no shape and no time.
    "phi-4-mini": ModelConfig(
        family=Family.PHI3,
        hidden=3072,
        layers=32,
        q_heads=24,
        kv_heads=8,
        head_dim=128,
        intermediate=8192,
        vocab=200064,
        rms_eps=1e-5,
        rotary_dims=96,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(200020, 199999),
    ),
}
