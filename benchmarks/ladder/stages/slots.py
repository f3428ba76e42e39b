"""Two slots: every token travels to pinned memory of its own slot, behind its step, and is read one
step late.

While the host reads the token of step t, step t + 1 is queued already. Tokens come one by one
again, and one step at most runs past the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache

from photon_ext import Event, PinnedBuffer, Stream


def read_late(
    launch: Callable[[int], None], token: torch.Tensor, max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    """Tokens one by one; ``launch(n)`` enqueues step n from 1 on, which leaves its in ``token``."""
    if token.device.type == "cuda":
        stream = Stream.wrap(torch.cuda.current_stream(token.device).cuda_stream)
    else:
        stream = Stream.create("inline")
    slots = [(PinnedBuffer(token.nbytes, stream.backend), Event(stream.backend)) for _ in range(2)]
    for launched in range(1, max_new_tokens + 2):
        if launched <= max_new_tokens:
            launch(launched)
            pinned, copied = slots[launched % 2]
            stream.copy(pinned.ptr, token.data_ptr(), token.nbytes)
            stream.record(copied)
        if launched > 1:
            pinned, copied = slots[(launched - 1) % 2]
            copied.synchronize()  # the only wait, while the step after this one runs
            ready = memoryview(pinned)[0]  # of an int64 the low word
            yield ready
            if ready in stop_ids:
                break
    stream.synchronize()  # a step past the end still uses all of this


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
