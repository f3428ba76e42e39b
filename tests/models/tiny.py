"""Tiny random models, built by transformers, that the tests of this folder compare with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 131
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _sizes(hidden: int, q_heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    return {"hidden_size": hidden, **heads, "head_dim": head_dim, **more}


LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
# name -> (family, options). Widths that are no multiple of 8, odd head counts, head sizes beside
# the usual ones.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-plain": ("llama", _sizes(64, 4, 2, 16)),
    "llama-6-2-24-tied": ("llama", _sizes(30, 6, 2, 24, tie_word_embeddings=True)),
    "llama-7-1-96-scaled": ("llama", _sizes(49, 7, 1, 96, rope_parameters=LLAMA3_ROPE)),
    "llama-biased-linear": ("llama", _sizes(36, 3, 3, 12, rope_parameters=LINEAR_ROPE, **BIASES)),
    "qwen3-tied": ("qwen3", _sizes(64, 4, 2, 32, tie_word_embeddings=True)),
    "qwen3-6-3-24": ("qwen3", _sizes(42, 6, 3, 24)),
}


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model of `TINY[name]`; weights are large enough that logits are far apart, and
    norms are not all one.
    """
    family, options = TINY[name]
    common = {
        "vocab_size": VOCAB,
        "intermediate_size": 45,
        "num_hidden_layers": 3,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    return random_model({"model_type": family, **common, **options}, seed)


def random_model(values: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """The float32 model of a config.json with these values."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**copy.deepcopy(values))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(
                    torch.randn_like(parameter)
                    * (0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
                )
    return model.eval()


def saved_tiny_model(
    name: str, folder: Path, seed: int = 0, max_shard_size: str = "1GB"
) -> PreTrainedModel:
    """`tiny_model`, also written to `folder` as a Hugging Face directory."""
    model = tiny_model(name, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def saved_random_model(values: dict[str, Any], folder: Path, seed: int = 0) -> PreTrainedModel:
    """`random_model`, also written to `folder` with config.json as it is given."""
    model = random_model(values, seed)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return model


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits of transformers after every token, [len(ids), vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def greedy_ids(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of transformers after `prompt`; end-of-text tokens do not stop it."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=None,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
