"""Our attention: one op rotates, appends and attends on the loop's own cache, by its strides.

Prompts keep the loop's attention.

The op reads as many keys as the sequence has. Attention behind a mask reads the whole cache at
every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.ladder.stock.carry_over import forward
from benchmarks.ladder.stock.model import Model
from benchmarks.ladder.stock.preallocate import allocate, linear
from photon_ext import Pipeline, RowParams, Runtime, ops
from photon_ext.runtime import StepKind, StepTensors


def forward_decode(model: Model, meta: torch.Tensor, memory: SimpleNamespace) -> torch.Tensor:
    """Logits [1, vocab] of a decode step, decode_meta int32 [1, 4]. Writes ``memory``'s cache."""
    config, weights, scale = model.config, model.weights, model.config.head_dim**-0.5
    tables = meta, memory.pages, model.cos, model.sin
    x = F.embedding(meta[:, 0], weights.embedding.data)
    for layer, keys, values in zip(weights.layers, memory.keys, memory.values, strict=True):
        qkv = linear(
            model.norm(x, layer.attention.qkv.norm), layer.attention.qkv.weight.data, out=memory.qkv
        )
        heads = qkv.view(1, -1, config.head_dim)
        q, k, v = heads.split((config.q_heads, config.kv_heads, config.kv_heads), dim=1)
        paged, norms = (
            (keys.transpose(1, 2), values.transpose(1, 2)),
            (layer.attention.q_norm, layer.attention.k_norm),
        )
        ops.fused_attention_decode_into(
            memory.out, q, k, v, *paged, *tables, scale, *norms, config.rms_eps
        )
        x += linear(memory.out.flatten(1), layer.attention.o.weight.data, out=memory.projected)
        normed = model.norm(x, layer.mlp.gate_up.norm)
        gate, up = linear(normed, layer.mlp.gate_up.weight.data, out=memory.gate_up).chunk(
            2, dim=-1
        )
        act = torch.mul(F.silu(gate), up, out=memory.act[:1])
        x += linear(act, layer.mlp.down.weight.data, out=memory.projected)
    return linear(model.norm(x, weights.head.norm), weights.head.weight.data, out=memory.logits)


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    max_len = len(prompt_ids) + max_new_tokens
    memory = allocate(model, max_len)
    memory.out = memory.qkv.new_zeros(1, model.config.q_heads, model.config.head_dim)
    # Page table: the cache is one page, of whichever row.
    memory.pages = torch.zeros(2, 1, dtype=torch.int32, device=model.device)

    def enqueue(step: StepTensors) -> None:
        run = forward_decode if step.kind is StepKind.DECODE else forward
        step.logits = run(model, step.decode_meta, memory)

    runtime = Runtime(max_rows=1, max_len=max_len, depth=2, device=model.device)
    pipeline = Pipeline(
        runtime, enqueue, vocab_size=model.config.vocab, graph=model.device.type == "cuda"
    )
    params = RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
    pipeline.admit(prompt_ids, params)
    while pipeline.busy:
        yield from (event.token for event in pipeline.tick() if event.token is not None)
