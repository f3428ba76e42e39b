"""Two slots: every token travels to pinned memory of its own slot, behind its step, and is read one
step late, as in the plain loop.

While the host reads the token of step t, step t + 1 is queued already. Tokens come one by one
again, and one step at most runs past the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.ladder.stock.slots import read_late


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    places = torch.arange(len(prompt_ids), device=model.device)[None]
    next_ids, position = prompt[:, -1:].clone(), places[:, -1:].clone()

    def launch(step: int) -> None:
        ids, positions = (prompt, places) if step == 1 else (next_ids, position)
        inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache}
        logits = model(**inputs, logits_to_keep=1).logits
        next_ids.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    yield from read_late(launch, next_ids, max_new_tokens, stop_ids)
