"""DecoderWeights from a GGUF file, dequantized."""

from __future__ import annotations

import re

import torch

from photon_ext.errors import ModelError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.gguf_config import OUTPUT, ROPE_FACTORS
from photon_ext.models.gguf_file import GgufFile
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": OUTPUT,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def gguf_name(name: str) -> str:
    """The GGUF name of a parameter that Hugging Face calls `name`."""
    match = _LAYER_NAME.fullmatch(name)
    return f"blk.{match[1]}.{_LAYER[match[2]]}.weight" if match else _TOP_LEVEL[name]


def unpermute_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of a Llama q or k projection, [heads * D, H].

    llama.cpp rotates neighbouring pairs and stores row pairs interleaved; our rotation, like
    Hugging Face's, pairs row i with row i + D/2.
    """
    n, k = rows.shape
    return rows.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)


def load_gguf_weights(
    file: GgufFile,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Dequantizes every parameter of `config` from `file`, converted to `dtype` on `device`.

    Raises ModelError, naming the file and the tensor, where one is missing, of another shape, or
    would be ignored.
    """
    _check_tensors(
        file,
        {
            gguf_name(name): slot.shape
            for name, slot in weight_slots(config, empty_weights(config, dtype, "meta"))
        },
    )
    weights = empty_weights(config, dtype, device)
    for hf_name, slot in weight_slots(config, weights):
        name = gguf_name(hf_name)
        tensor = file.tensor(name)
        if config.family is Family.LLAMA and name.endswith((".attn_q.weight", ".attn_k.weight")):
            tensor = unpermute_heads(
                tensor, config.q_heads if "attn_q" in name else config.kv_heads
            )
        slot.copy_(tensor)
    return weights


def _check_tensors(file: GgufFile, expected: dict[str, torch.Size]) -> None:
    """Before anything is allocated: a damaged size would ask for all the memory there is."""
    missing = sorted(expected.keys() - file.tensor_names)
    extra = sorted(file.tensor_names - expected.keys() - {ROPE_FACTORS})
    if missing:
        raise ModelError(
            f"{file.path}: {len(missing)} of {len(expected)} tensors are missing, first "
            f"{missing[0]!r}; download it again"
        )
    if extra:
        raise ModelError(
            f"{file.path}: {len(extra)} tensors would be ignored, first {extra[0]!r}; this variant "
            "is not supported"
        )
    for name, shape in expected.items():
        if file.shape(name) != tuple(shape):
            raise ModelError(
                f"{file.path}: {name} has shape {list(file.shape(name))}, its metadata asks for "
                f"{list(shape)}"
            )
