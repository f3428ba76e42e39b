"""Two slots: every token travels to pinned memory of its own slot, behind its step, and is read one
step late.

While the host reads the token of step t, step t + 1 is queued already. Tokens come one by one
again, and one step at most runs past the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache

from photon_ext import Event, PinnedBuffer, Stream


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    positions = torch.arange(len(prompt_ids), device=model.device)[None]
    next_ids, position = ids[:, -1:].clone(), positions[:, -1:].clone()
    cuda = model.device.type == "cuda"
    stream = (
        Stream.wrap(torch.cuda.current_stream(model.device).cuda_stream)
        if cuda
        else Stream.create("inline")
    )
    slots = [(PinnedBuffer(8, stream.backend), Event(stream.backend)) for _ in range(2)]

    def step(ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = model(
            input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
        next_ids.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    for launched in range(1, max_new_tokens + 2):
        if launched <= max_new_tokens:
            step(ids, positions)
            ids, positions = next_ids, position
            pinned, copied = slots[launched % 2]
            stream.copy(pinned.ptr, next_ids.data_ptr(), 8)
            stream.record(copied)
        if launched > 1:
            pinned, copied = slots[(launched - 1) % 2]
            copied.synchronize()  # the only wait, while the step after this one runs
            ready = memoryview(pinned)[0]  # the low word of an int64
            yield ready
            if ready in stop_ids:
                break
    stream.synchronize()  # a step past the end still uses all of this
