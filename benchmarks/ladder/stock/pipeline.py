"""The pipeline: slots, carry-over, events, graphs and stops are the runtime's; what is left is the
forward and where it finds its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.ladder.stock.carry_over import forward
from benchmarks.ladder.stock.model import Model
from benchmarks.ladder.stock.preallocate import allocate
from photon_ext import Pipeline, RowParams, Runtime
from photon_ext.runtime import StepTensors


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    max_len = len(prompt_ids) + max_new_tokens
    memory = allocate(model, max_len)

    def enqueue(step: StepTensors) -> None:
        step.logits = forward(model, step.decode_meta, memory)

    runtime = Runtime(max_rows=1, max_len=max_len, depth=2, device=model.device)
    pipeline = Pipeline(
        runtime, enqueue, vocab_size=model.config.vocab, graph=model.device.type == "cuda"
    )
    params = RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
    pipeline.admit(prompt_ids, params)
    while pipeline.busy:
        yield from (event.token for event in pipeline.tick() if event.token is not None)
