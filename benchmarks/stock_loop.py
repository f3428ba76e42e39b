"""The loop that README's adoption example replaces: a Hugging Face model, its static cache, and one blocking read per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StaticCache


def decode(model: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Greedy tokens of one sequence; ``.item()`` waits for the device at every step."""
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    positions = torch.arange(len(prompt_ids), device=model.device)[None]
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < max_new_tokens:
            logits = model(input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1)
            tokens.append(int(token.item()))
            if tokens[-1] in stop_ids:
                break
            ids, positions = token[:, None], positions[:, -1:] + 1
    return tokens
