"""Our step: the same weights under our decoder, whose kernels read the step from the device and
write into memory that it owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.ladder.stock.model import Model
from photon_ext import Pipeline, RowParams, Runtime
from photon_ext.checks import Backend
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import plan_for


@torch.inference_mode()
def decode(
    model: Model,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    backend: Backend = "portable",
) -> Iterator[int]:
    max_len = len(prompt_ids) + max_new_tokens
    pages = {"page_size": max_len, "num_pages": 2}  # rows count from 1, and row 1 has page 1
    decoder = Decoder(
        model.config,
        model.weights,
        max_step_tokens=256,
        max_segments=1,
        max_len=max_len,
        plan=plan_for(model.config, model.weights, backend),
        **pages,
    )
    runtime = Runtime(
        max_rows=1,
        max_len=max_len,
        depth=2,
        device=model.device,
        backend=backend,
    )
    pipeline = Pipeline(runtime, decoder.forward, vocab_size=model.config.vocab)
    params = RowParams(max_new_tokens, stop_token_ids=tuple(stop_ids))
    pipeline.admit(prompt_ids, params)
    while pipeline.busy:
        yield from (event.token for event in pipeline.tick() if event.token is not None)
