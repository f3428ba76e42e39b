"""Our attention: one op rotates, appends and attends on the loop's own cache, through its strides.
Prompts keep the loop's attention.

The op reads as many keys as the sequence has. Attention behind a mask reads the whole cache at
every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.ladder.stock.model import Model, rotate
from photon_ext import Pipeline, Runtime, ops
from photon_ext.runtime import StepKind, StepTensors


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
        out=zeros(1, config.q_heads, config.head_dim),
        # page table: the cache is one page, of whichever row
        pages=torch.zeros(2, 1, dtype=torch.int32, device=model.device),
        places=torch.arange(length, device=model.device),
    )


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in the leading rows of ``out``."""
    return torch.mm(x, weight.t(), out=out[: len(x)])


def forward(model: Model, step: StepTensors, memory: SimpleNamespace) -> torch.Tensor:
    """Logits [1, vocab] after the last token of the step. Writes the cache in ``memory``."""
    config, weights = model.config, model.weights
    meta, scale = step.decode_meta, config.head_dim**-0.5
    ids, positions = meta[:, 0], meta[:, 1].long()
    cos, sin = model.cos[positions], model.sin[positions]
    mask = memory.places <= positions[:, None]
    x = F.embedding(ids, weights.embedding)
    for layer, keys, values in zip(weights.layers, memory.keys, memory.values, strict=True):
        qkv = linear(model.norm(x, layer.input_norm), layer.qkv.weight, out=memory.qkv).view(
            len(ids), -1, config.head_dim
        )
        q, k, v = qkv.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        if step.kind is StepKind.DECODE:
            paged = keys.transpose(1, 2), values.transpose(1, 2)
            norms = layer.q_norm, layer.k_norm, config.rms_eps
            ops.fused_attention_decode_into(
                memory.out, q, k, v, *paged, meta, memory.pages, model.cos, model.sin, scale, *norms
            )
            out = memory.out.transpose(0, 1)[None]
        else:
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
    max_len = len(prompt_ids) + max_new_tokens
    memory = allocate(model, max_len)

    def enqueue(step: StepTensors) -> None:
        step.logits = forward(model, step, memory)

    runtime = Runtime(max_rows=1, max_len=max_len, depth=2, device=model.device)
    pipeline = Pipeline(
        runtime, enqueue, vocab_size=model.config.vocab, graph=model.device.type == "cuda"
    )
    pipeline.admit(prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    while pipeline.busy:
        yield from (event.token for event in pipeline.tick() if event.token is not None)
