"""One CUDA graph per step: the second decode step is recorded, and replayed for every token from
there on. On a CPU the steps stay eager.

The first decode step runs as it is, so that libraries initialize themselves outside of the
recording; recording runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.ladder.stages.slots import read_late


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    cache = StaticCache(config=model.config, max_cache_len=len(prompt_ids) + max_new_tokens)
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    places = torch.arange(len(prompt_ids), device=model.device)[None]
    next_ids, position = prompt[:, -1:].clone(), places[:, -1:].clone()
    graph = torch.cuda.CUDAGraph() if model.device.type == "cuda" else None

    def run(ids: torch.Tensor, positions: torch.Tensor) -> None:
        inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache}
        logits = model(**inputs, logits_to_keep=1).logits
        next_ids.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    def launch(step: int) -> None:
        if graph is None or step < 3:
            run(*((prompt, places) if step == 1 else (next_ids, position)))
            return
        if step == 3:
            with torch.cuda.graph(graph):
                run(next_ids, position)
        graph.replay()

    yield from read_late(launch, next_ids, max_new_tokens, stop_ids)
