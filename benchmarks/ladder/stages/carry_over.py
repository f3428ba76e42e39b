"""Carry-over: token and position stay on the device, where the next step reads them, and the host
asks for tokens eight at a time.

The price: up to seven steps run past the end, and tokens arrive in bursts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache

BURST = 8


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    positions = torch.arange(len(prompt_ids), device=model.device)[None]
    next_ids, position = ids[:, -1:].clone(), positions[:, -1:].clone()
    sampled = torch.zeros(max_new_tokens, dtype=torch.int64, device=model.device)
    known = 0

    def step(ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = model(
            input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
        next_ids.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    for launched in range(1, max_new_tokens + 1):
        step(ids, positions)
        ids, positions = next_ids, position
        sampled[launched - 1 : launched].copy_(next_ids[0])
        if launched % BURST and launched < max_new_tokens:
            continue
        for ready in sampled[known:launched].tolist():  # the only wait, once in eight steps
            yield ready
            if ready in stop_ids:
                return
        known = launched
