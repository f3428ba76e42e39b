"""The logits of a text, by the Decoder's own forward."""

from __future__ import annotations

import torch

from photon_ext import ops
from photon_ext.checks import Activations, KvDtype
from photon_ext.layout import ROW_COLUMNS, SegmentFlag
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import ALL, ExecutionModes, KernelPlan, plan_for
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime.step import StepKind, StepTensors

CHUNK = 256  # tokens of a step
HEAD = 64  # of them at most go through the head at once
PAGE_SIZE = 16
ROW = 1  # row 0 is padding


def text_logits(
    config: ModelConfig,
    weights: DecoderWeights,
    ids: list[int],
    chunk: int = CHUNK,
    kv_dtype: KvDtype | None = None,
    activations: Activations | None = None,
) -> torch.Tensor:
    """float32 [tokens, vocab], on the device of the weights: what follows each token of a text.

    `chunk`: tokens of a step; with 1 all are decode steps, whose kernels are others. `kv_dtype`
    and `activations`: as an engine has them. Raises ConfigError for a text that is longer than the
    model takes.
    """
    device, chunk = weights.device, min(chunk, len(ids))
    pages = -(-len(ids) // PAGE_SIZE)
    sizes = (chunk, min(chunk, HEAD), len(ids), PAGE_SIZE, pages)
    plan = _plan(config, weights, activations)
    decoder = Decoder(config, weights, *sizes, plan, kv_dtype=kv_dtype)
    tokens = torch.tensor(ids, dtype=torch.int32, device=device)
    page_table = torch.arange(pages, dtype=torch.int32, device=device).repeat(2, 1)
    found = torch.empty(len(ids), config.vocab, device=device)
    for first in range(0, len(ids), chunk):
        step = _step(tokens[first : first + chunk], first, page_table, chunk == 1)
        rows = found[first : first + chunk]
        if step.kind is StepKind.PREFILL:
            step.score = lambda logits, at, rows=rows: rows[at : at + len(logits)].copy_(logits)
        decoder.forward(step)
        if step.kind is StepKind.DECODE:
            rows.copy_(step.logits)
    return found


def _plan(
    config: ModelConfig, weights: DecoderWeights, activations: Activations | None
) -> KernelPlan:
    """An engine's; with activations in fp8 on a CPU, which no engine has, that of their numbers."""
    if activations is None or weights.device.type == "cuda":
        return plan_for(config, weights, activations=activations)
    every = ExecutionModes(batch_tokens=ALL, least_batch_tokens=1)
    return KernelPlan(decode=every, chunks=every, fp8_activations=True)


def _step(tokens: torch.Tensor, first: int, page_table: torch.Tensor, decode: bool) -> StepTensors:
    """The next tokens of ROW, from position `first` on."""
    device, count = tokens.device, len(tokens)

    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(first, first + count, dtype=torch.int32, device=device)
    decode_meta = torch.empty(count, 4, dtype=torch.int32, device=device)
    ops.decode_meta_set_(decode_meta, tokens, positions, torch.full_like(tokens, ROW))
    row_state = torch.zeros(2, ROW_COLUMNS, dtype=torch.int32, device=device)
    return StepTensors(
        kind=StepKind.DECODE if decode else StepKind.PREFILL,
        decode_tokens=count if decode else 0,
        decode_meta=decode_meta,
        segments=words(ROW, 0, count, SegmentFlag.SAMPLE).view(1, 4),
        counts=words(count if decode else 0, count, 1),
        tables=[row_state, page_table, torch.zeros_like(page_table)],
        page_table=page_table,
        row_state=row_state,
        sampled=words(0),
        max_length=page_table.shape[1] * PAGE_SIZE,
    )
