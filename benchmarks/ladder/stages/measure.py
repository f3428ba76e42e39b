"""The loop as it is usually written: transformers' default cache, which grows, and every token goes
to the host and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        token = int(logits[:, -1].argmax(-1).item())  # waits for the device
        yield token
        if token in stop_ids:
            return
        ids = torch.tensor([[token]], device=model.device)  # and the device waits for this
