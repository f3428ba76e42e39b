"""A tiny random model of bytes, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, EOS = 257, 32, 256
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "bos_token_id": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (32, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (16, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (16, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "model.layers.0.mlp.gate_proj.weight": (48, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (48, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, 48),
}


def save_model(folder: Path) -> None:
    """The model, and a tokenizer without a chat template."""
    save_weights(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def save_weights(folder: Path, **config: Any) -> None:
    """The model alone. `config`: what differs from CONFIG; of sizes, the vocabulary's alone."""
    config = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(0)
    embedding = "model.embed_tokens.weight"
    shapes = {**SHAPES, embedding: (config["vocab_size"], HIDDEN)}
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=noise) * 0.3
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
