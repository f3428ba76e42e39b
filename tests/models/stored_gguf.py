"""GGUF files whose matrices have the blocks of llama.cpp, and the models of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from transformers import PreTrainedModel

from photon_ext.weight_format import WeightFormat
from tests.models.tiny import random_model
from tests.models.tiny_gguf import permute_heads, write_tiny_gguf
from tests.ops.stored import HALVES, random_weight
from tests.ops.stored import Kind as StoredKind

KINDS = [Kind[form.name] for form in HALVES]  # that kernels read
_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes `permute_heads`."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def blocks_of(weight: torch.Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """uint8 [n, bytes]: a matrix rounded to a type; of the types that the package cannot write,
    random blocks of as many columns.
    """
    try:
        rounded: np.ndarray[Any, Any] = quants.quantize(weight.numpy(), kind)
    except NotImplementedError:
        n, k = weight.shape
        if kind.name in WeightFormat.__members__:
            stored = StoredKind(WeightFormat[kind.name])
            return random_weight(stored, n, k, seed=n + k).data.numpy()
        return _random_blocks(kind, n, k)
    return rounded


def _random_blocks(kind: Kind, n: int, k: int) -> np.ndarray[Any, Any]:
    """Of Q2_K and IQ4_NL."""
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(n + k)
    blocks = chance.integers(256, size=(n, k // columns, size), dtype=np.uint8)
    for at in (80, 82) if kind is Kind.Q2_K else (0,):
        scale = np.float16(0.0005) if kind is Kind.Q2_K else np.float16(0.001)
        blocks[..., at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(n, -1)


def write_stored_gguf(
    family: str | dict[str, Any], path: Path, kind_of: Callable[[str], Kind | None]
) -> PreTrainedModel:
    """A GGUF file of a random model, of FAMILIES or of a config.json, each matrix in the type that
    `kind_of` says by its name (None: float32); and the transformers model of the numbers that the
    gguf package reads in it.
    """
    model = random_model(FAMILIES[family] if isinstance(family, str) else family)
    config, blocks = model.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        kind = kind_of(name) if parameter.dim() == 2 else None
        if kind is None:
            continue
        weight = parameter.detach().clone()
        permuted = heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
        if permuted:
            weight = permute_heads(weight, permuted)
        data = blocks_of(weight.contiguous(), kind)
        blocks[name] = data, kind
        numbers = torch.from_numpy(np.array(quants.dequantize(data, kind), np.float32))
        parameter.data.copy_(unpermute(numbers, permuted) if permuted else numbers)
    write_tiny_gguf(model, path, blocks=blocks)
    return model
