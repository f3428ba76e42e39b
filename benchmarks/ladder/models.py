"""The model that a ladder runs: random weights of a named shape, the same ones in both loops."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.result import BenchmarkError
from benchmarks.common.shapes import SHAPES
from benchmarks.ladder.stock.model import Model
from photon_ext.models.config import Family, ModelConfig, RopeScalingKind
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots


def build_model(
    loop: str, name: str, dtype: torch.dtype, device: torch.device, max_len: int
) -> Any:
    """The model of one loop: "stock" (a `Model`) or "hf" (a transformers model).

    Raises BenchmarkError for an unknown name.
    """
    if name not in SHAPES:
        raise BenchmarkError(f"--model {name!r} is unknown; use one of {', '.join(SHAPES)}")
    config = SHAPES[name]
    if max_len > config.max_positions:
        raise BenchmarkError(
            f"prompt and tokens are {max_len} positions, {name} was made for "
            f"{config.max_positions}; ask for fewer"
        )
    weights = spread_weights(config, dtype, device)
    if loop == "stock":
        return Model(config, weights, *rope_tables(config, max_len, device))
    return transformers_model(config, weights)


def spread_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> DecoderWeights:
    """Random weights whose greedy tokens vary, so that equal tokens show something: plain small
    ones repeat the last token for ever.

    The first layer's attention is sharp, which makes the next token hang on the whole history. Not
    that of every layer: through 28 such layers a rounding error grows a thousandfold, and float32
    would not decide between near-ties any more.
    """
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    sharpened = ("q_norm", "k_norm") if config.qk_norm else ("q_proj", "k_proj")
    for name, slot in weight_slots(config, weights):
        if name.endswith("norm.weight"):
            slot.normal_(1.0, 0.2, generator=generator)
        else:
            slot.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)
        if name in [f"model.layers.0.self_attn.{each}.weight" for each in sharpened]:
            slot.mul_(4.0)
    return weights


def transformers_model(config: ModelConfig, weights: DecoderWeights) -> Any:
    """The same model in transformers, with a copy of the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    make_config, make_model = {
        Family.LLAMA: (LlamaConfig, LlamaForCausalLM),
        Family.QWEN3: (Qwen3Config, Qwen3ForCausalLM),
    }[config.family]
    with torch.device(weights.device):
        model = make_model(make_config(**_transformers_fields(config))).to(weights.dtype).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, slot in weight_slots(config, weights):
            parameters[name].copy_(slot)
    return model


def _transformers_fields(config: ModelConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling.kind is RopeScalingKind.LLAMA3:
        scaling = asdict(config.rope_scaling)
        rope |= {name: scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
        rope |= {
            "rope_type": "llama3",
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": rope,
    }
