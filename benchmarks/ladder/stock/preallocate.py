"""Pre-allocated: a cache of full length, and buffers for whatever torch can write with ``out=``.

Addresses stay from here on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.ladder.stock.model import Model, rotate


def allocate(model: Model, length: int) -> SimpleNamespace:
    """Memory for ``length`` tokens: keys and values by layer, activations, logits."""
    config = model.config

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=model.weights.dtype, device=model.device)

    return SimpleNamespace(
        keys=[zeros(1, config.kv_heads, length, config.head_dim) for _ in range(config.layers)],
        values=[zeros(1, config.kv_heads, length, config.head_dim) for _ in range(config.layers)],
        qkv=zeros(length, config.qkv_size),
        projected=zeros(length, config.hidden),
        gate_up=zeros(length, 2 * config.intermediate),
        act=zeros(length, config.intermediate),
        logits=zeros(1, config.vocab),
        places=torch.arange(length, device=model.device),  # of the cache, for masks
    )


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in the leading rows of ``out``."""
    return torch.mm(x, weight.t(), out=out[: len(x)])


def forward(
    model: Model, ids: torch.Tensor, position: int, memory: SimpleNamespace
) -> torch.Tensor:
    """Logits [1, vocab] after the last of ``ids`` [T], whose first stands at ``position``. Writes
    the cache in ``memory``."""
    config, weights = model.config, model.weights
    end = position + len(ids)
    cos, sin = model.cos[position:end], model.sin[position:end]
    x = F.embedding(ids, weights.embedding.data)
    for layer, keys, values in zip(weights.layers, memory.keys, memory.values, strict=True):
        qkv = linear(
            model.norm(x, layer.attention.qkv.norm), layer.attention.qkv.weight.data, out=memory.qkv
        )
        heads = qkv.view(len(ids), -1, config.head_dim)
        q, k, v = heads.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        q = rotate(model.norm(q, layer.attention.q_norm), cos, sin)
        k = rotate(model.norm(k, layer.attention.k_norm), cos, sin)
        keys[0, :, position:end] = k.transpose(0, 1)
        values[0, :, position:end] = v.transpose(0, 1)
        context = keys[:, :, :end], values[:, :, :end]
        query, causal = q.transpose(0, 1)[None], len(ids) > 1
        out = F.scaled_dot_product_attention(query, *context, is_causal=causal, enable_gqa=True)
        attended = out[0].transpose(0, 1).reshape(len(ids), -1)
        x += linear(attended, layer.attention.o.weight.data, out=memory.projected)
        normed = model.norm(x, layer.mlp.gate_up.norm)
        gate, up = linear(normed, layer.mlp.gate_up.weight.data, out=memory.gate_up).chunk(
            2, dim=-1
        )
        act = torch.mul(F.silu(gate), up, out=memory.act[: len(ids)])
        x += linear(act, layer.mlp.down.weight.data, out=memory.projected)
    return linear(
        model.norm(x[-1:], weights.head.norm), weights.head.weight.data, out=memory.logits
    )


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    memory = allocate(model, len(prompt_ids) + max_new_tokens)
    ids = torch.tensor(prompt_ids, device=model.device)
    next_ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    position = 0
    for _ in range(max_new_tokens):
        token = int(forward(model, ids, position, memory).argmax(-1).item())  # waits for the device
        yield token
        if token in stop_ids:
            return
        position += len(ids)
        ids = next_ids.fill_(token)  # and the device waits for this
