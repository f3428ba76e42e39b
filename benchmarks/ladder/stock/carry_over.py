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
from photon_ext import ops

BURST = 8


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
        places=torch.arange(length, device=model.device),
    )


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in the leading rows of ``out``."""
    return torch.mm(x, weight.t(), out=out[: len(x)])


def forward(model: Model, meta: torch.Tensor, memory: SimpleNamespace) -> torch.Tensor:
    """Logits [1, vocab] after the last token of ``meta``, decode_meta int32 [T, 4].

    Writes the cache in ``memory``.
    """
    config, weights = model.config, model.weights
    ids, positions = meta[:, 0], meta[:, 1].long()
    cos, sin = model.cos[positions], model.sin[positions]
    mask = memory.places <= positions[:, None]
    x = F.embedding(ids, weights.embedding)
    for layer, keys, values in zip(weights.layers, memory.keys, memory.values, strict=True):
        qkv = linear(model.norm(x, layer.input_norm), layer.qkv.weight, out=memory.qkv).view(
            len(ids), -1, config.head_dim
        )
        q, k, v = qkv.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        q, k = (
            rotate(model.norm(q, layer.q_norm), cos, sin),
            rotate(model.norm(k, layer.k_norm), cos, sin),
        )
        keys[0].index_copy_(1, positions, k.transpose(0, 1))
        values[0].index_copy_(1, positions, v.transpose(0, 1))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        x += linear(
            out[0].transpose(0, 1).reshape(len(ids), -1), layer.o.weight, out=memory.projected
        )
        gate, up = linear(
            model.norm(x, layer.post_norm), layer.gate_up.weight, out=memory.gate_up
        ).chunk(2, dim=-1)
        x += linear(
            torch.mul(F.silu(gate), up, out=memory.act[: len(ids)]),
            layer.down.weight,
            out=memory.projected,
        )
    return linear(model.norm(x[-1:], weights.final_norm), weights.lm_head, out=memory.logits)


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    memory = allocate(model, len(prompt_ids) + max_new_tokens)
    ids = torch.tensor(prompt_ids, dtype=torch.int32, device=model.device)
    positions = torch.arange(len(prompt_ids), dtype=torch.int32, device=model.device)
    meta, next_meta = (
        torch.zeros(num_tokens, 4, dtype=torch.int32, device=model.device)
        for num_tokens in (len(prompt_ids), 1)
    )
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
