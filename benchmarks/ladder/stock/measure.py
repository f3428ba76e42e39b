"""The loop as it is usually written: the cache grows by ``torch.cat``, and every token goes to the
host and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from benchmarks.ladder.stock.model import Model, rotate


def forward(
    model: Model, ids: torch.Tensor, position: int, cache: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Logits [1, vocab] after the last of ``ids`` [T], whose first stands at ``position``. Appends
    to ``cache``, (k, v) by layer."""
    config, weights = model.config, model.weights
    cos, sin = model.cos[position : position + len(ids)], model.sin[position : position + len(ids)]
    x = F.embedding(ids, weights.embedding.data)
    for index, layer in enumerate(weights.layers):
        qkv = F.linear(model.norm(x, layer.attention.qkv.norm), layer.attention.qkv.weight.data)
        heads = qkv.view(len(ids), -1, config.head_dim)
        q, k, v = heads.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        q = rotate(model.norm(q, layer.attention.q_norm), cos, sin)
        k = rotate(model.norm(k, layer.attention.k_norm), cos, sin)
        keys = torch.cat((cache[index][0], k.transpose(0, 1)[None]), dim=2)
        values = torch.cat((cache[index][1], v.transpose(0, 1)[None]), dim=2)
        cache[index] = keys, values
        query, context, causal = q.transpose(0, 1)[None], cache[index], len(ids) > 1
        out = F.scaled_dot_product_attention(query, *context, is_causal=causal, enable_gqa=True)
        x = x + F.linear(
            out[0].transpose(0, 1).reshape(len(ids), -1), layer.attention.o.weight.data
        )
        gate, up = F.linear(
            model.norm(x, layer.mlp.gate_up.norm), layer.mlp.gate_up.weight.data
        ).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.mlp.down.weight.data)
    return F.linear(model.norm(x[-1:], weights.head.norm), weights.head.weight.data)


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    empty = model.cos.new_empty(
        (1, model.config.kv_heads, 0, model.config.head_dim), dtype=model.weights.dtype
    )
    cache = [(empty, empty)] * model.config.layers
    ids = torch.tensor(prompt_ids, device=model.device)
    position = 0
    for _ in range(max_new_tokens):
        token = int(forward(model, ids, position, cache).argmax(-1).item())  # waits for the device
        yield token
        if token in stop_ids:
            return
        position += len(ids)
        ids = torch.tensor([token], device=model.device)  # and the device waits for this
