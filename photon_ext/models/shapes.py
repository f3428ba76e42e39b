"""Shapes of published models, for benchmarks with random weights and `photon-ext info --plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from photon_ext.models.config import Family, ModelConfig, RopeScaling, RopeScalingKind
from photon_ext.models.projections import layer_projections
from photon_ext.models.quantization import (
    EMBEDDING,
    Fp8Scheme,
    ModuleFormats,
    ScaleShare,
    StoredFormat,
)
from photon_ext.weight_format import WeightFormat

_LLAMA32_SCALING = RopeScaling(RopeScalingKind.LLAMA3, 32.0, 1.0, 4.0, 8192)


def _qwen3(hidden: int, layers: int, q_heads: int, intermediate: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        Family.QWEN3,
        *(hidden, layers, q_heads, 8, 128, intermediate, 151936),
        rope_theta=1e6,
        tied_embeddings=tied,
        max_positions=40960,
        eos_ids=(151645, 151643),
    )


# Sizes are those of hidden, layers, q_heads, kv_heads, head_dim, intermediate and vocab.
NAMED_SHAPES: Mapping[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "llama-3.2-1b": ModelConfig(
        Family.LLAMA,
        *(2048, 16, 32, 8, 64, 8192, 128256),
        rms_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=_LLAMA32_SCALING,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(128001,),
    ),
    "qwen2.5-0.5b": ModelConfig(
        Family.QWEN2,
        *(896, 24, 14, 2, 64, 4864, 151936),
        rope_theta=1e6,
        tied_embeddings=True,
        qkv_bias=True,
        max_positions=32768,
        eos_ids=(151645, 151643),
    ),
    "mistral-7b": ModelConfig(
        Family.MISTRAL,
        *(4096, 32, 32, 8, 128, 14336, 32768),
        rms_eps=1e-5,
        rope_theta=1e6,
        max_positions=32768,
        eos_ids=(2,),
    ),
    "granite-3.1-2b": ModelConfig(
        Family.GRANITE,
        *(2048, 40, 32, 8, 64, 8192, 49155),
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
        Family.SMOLLM3,
        *(2048, 36, 16, 4, 128, 11008, 128256),
        rope_theta=5e6,
        unrotated=tuple(range(3, 36, 4)),
        tied_embeddings=True,
        max_positions=65536,
        eos_ids=(128012,),
    ),
    # Without LongRoPE's 96 divisors, which change no shape and no time.
    "phi-4-mini": ModelConfig(
        Family.PHI3,
        *(3072, 32, 24, 8, 128, 8192, 200064),
        rms_eps=1e-5,
        rotary_dims=96,
        tied_embeddings=True,
        max_positions=131072,
        eos_ids=(200020, 199999),
    ),
}


def in_fp8(config: ModelConfig) -> ModelConfig:
    """The same with fp8 weights, as Qwen publishes its models: blocks, and a plain head."""
    stored = Fp8Scheme(ScaleShare.BLOCK, "weight_scale_inv", ("lm_head",))
    return replace(config, quantization=stored)


def in_q8_0(config: ModelConfig) -> ModelConfig:
    """The same in blocks as llama.cpp stores a model in Q8_0."""
    return _in_blocks(config, lambda module, index: WeightFormat.Q8_0)


def in_q4_k_m(config: ModelConfig) -> ModelConfig:
    """The same in blocks as llama.cpp stores a model in Q4_K_M: the head, and values and down
    projections of half of the layers, in q6_k.
    """
    eighth, head = config.layers // 8, EMBEDDING if config.tied_embeddings else "lm_head"

    def of(module: str, index: int) -> WeightFormat:
        more_bits = index < eighth or index >= 7 * config.layers // 8 or (index - eighth) % 3 == 2
        is_precise = module.endswith(("v_proj", "down_proj")) and more_bits
        return WeightFormat.Q6_K if module == head or is_precise else WeightFormat.Q4_K

    return _in_blocks(config, of)


def _in_blocks(config: ModelConfig, of: Callable[[str, int], WeightFormat]) -> ModelConfig:
    """`of`: the format of a module by its name and its layer."""
    indices = {
        f"model.layers.{index}.{module}": index
        for index in range(config.layers)
        for shape in layer_projections(config, index).values()
        for module in shape.modules
    }
    others = (EMBEDDING,) if config.tied_embeddings else (EMBEDDING, "lm_head")
    indices |= dict.fromkeys(others, 0)
    formats = {module: StoredFormat(of(module, index)) for module, index in indices.items()}
    return replace(config, quantization=ModuleFormats(formats))
