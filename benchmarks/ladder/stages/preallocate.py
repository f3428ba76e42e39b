"""Pre-allocated: the static cache, and fixed inputs. Activations are still allocated inside the
model; torch recycles their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    positions = torch.arange(len(prompt_ids), device=model.device)[None]
    next_ids, position = ids[:, -1:].clone(), positions[:, -1:].clone()
    for _ in range(max_new_tokens):
        logits = model(
            input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
        token = int(logits[:, -1].argmax(-1).item())  # waits for the device
        yield token
        if token in stop_ids:
            return
        ids, positions = next_ids.fill_(token), position.add_(1)  # and the device waits for this
