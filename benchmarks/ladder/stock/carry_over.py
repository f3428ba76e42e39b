"""Carry-over: token and position stay on the device, where the next step reads them, and the host
asks for tokens eight at a time.

The forward may use no number of the host's any more: rotary angles, the place in the cache and the
mask follow ``decode_meta``. The price: up to seven steps run past the end, and tokens arrive in
bursts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.ladder.stock.model import Model, rotate
from benchmarks.ladder.stock.preallocate import allocate, linear
from photon_ext import ops

BURST = 8


def forward(model: Model, meta: torch.Tensor, memory: SimpleNamespace) -> torch.Tensor:
    """Logits [1, vocab] after the last token of ``meta``, decode_meta int32 [T, 4]. Writes the
    cache in ``memory``."""
    config, weights = model.config, model.weights
    ids, positions = meta[:, 0], meta[:, 1].long()
    cos, sin = model.cos[positions], model.sin[positions]
    mask = memory.places <= positions[:, None]
    x = F.embedding(ids, weights.embedding.data)
    for layer, keys, values in zip(weights.layers, memory.keys, memory.values, strict=True):
        qkv = linear(
            model.norm(x, layer.attention.qkv.norm), layer.attention.qkv.weight.data, out=memory.qkv
        )
        heads = qkv.view(len(ids), -1, config.head_dim)
        q, k, v = heads.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        q = rotate(model.norm(q, layer.attention.q_norm), cos, sin)
        k = rotate(model.norm(k, layer.attention.k_norm), cos, sin)
        keys[0].index_copy_(1, positions, k.transpose(0, 1))
        values[0].index_copy_(1, positions, v.transpose(0, 1))
        query = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
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
    ids = torch.tensor(prompt_ids, dtype=torch.int32, device=model.device)
    positions = torch.arange(len(prompt_ids), dtype=torch.int32, device=model.device)
    meta, next_meta = (ids.new_zeros(tokens, 4) for tokens in (len(prompt_ids), 1))
    ops.decode_meta_set_(meta, ids, positions)
    token, position = ids[-1:].clone(), positions[-1:].clone()
    sampled = torch.zeros(max_new_tokens, dtype=torch.int32, device=model.device)
    known = 0

    def step(meta: torch.Tensor) -> None:
        token.copy_(forward(model, meta, memory).argmax(-1))
        ops.decode_meta_set_(next_meta, token, position.add_(1))  # what the next step reads

    for launched in range(1, max_new_tokens + 1):
        step(meta)
        meta = next_meta
        sampled[launched - 1 : launched].copy_(token)
        if launched % BURST and launched < max_new_tokens:
            continue
        for ready in sampled[known:launched].tolist():  # the only wait, once in eight steps
            yield ready
            if ready in stop_ids:
                return
        known = launched
