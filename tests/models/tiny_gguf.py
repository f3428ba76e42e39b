"""Writes tiny GGUF files the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

TOKENS = ["<|bos|>", "<|eos|>", *"abcdefgh", "Ġ", "ab", "Ġab", "cd"]
MERGES = ["a b", "Ġ ab", "c d"]
TYPES = [3, 3] + [1] * (len(TOKENS) - 2)


def permute_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of Llama q and k rows: the two halves of each head interleaved."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_tiny_gguf(
    model: PreTrainedModel,
    path: Path,
    fields: dict[str, Any] | None = None,
    rope_factors: torch.Tensor | None = None,
    alignment: int | None = None,
    blocks: Mapping[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
) -> None:
    """A float32 GGUF file of a transformers model with an invented vocabulary.

    `fields` replace or add string and integer metadata; `alignment`: bytes, None: the format's own;
    `blocks`: by the model's names, what is written in the place of a parameter.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in {**metadata, **(fields or {})}.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    blocks = blocks or {}
    family = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stored_name = names.get_name(name, (".weight",))
        if name in blocks:
            data, kind = blocks[name]
            writer.add_tensor(stored_name, data, raw_dtype=kind)
            continue
        tensor = parameter.detach()
        if architecture == "llama" and "q_proj" in name:
            tensor = permute_heads(tensor, config.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            tensor = permute_heads(tensor, config.num_key_value_heads)
        writer.add_tensor(stored_name, tensor.contiguous().numpy())
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
