"""One CUDA graph per step: the second decode step is recorded, and replayed for every token from
there on. On a CPU the steps stay eager.

The first decode step runs as it is, so that libraries initialize themselves outside of the
recording; recording runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.ladder.stock.carry_over import forward
from benchmarks.ladder.stock.model import Model
from benchmarks.ladder.stock.preallocate import allocate
from benchmarks.ladder.stock.slots import read_late
from photon_ext import ops


@torch.inference_mode()
def decode(
    model: Model, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    memory = allocate(model, len(prompt_ids) + max_new_tokens)
    ids = torch.tensor(prompt_ids, dtype=torch.int32, device=model.device)
    positions = torch.arange(len(prompt_ids), dtype=torch.int32, device=model.device)
    first, later = (ids.new_zeros(tokens, 4) for tokens in (len(prompt_ids), 1))
    ops.decode_meta_set_(first, ids, positions)
    token, position = ids[-1:].clone(), positions[-1:].clone()
    graph = torch.cuda.CUDAGraph() if model.device.type == "cuda" else None

    def run(meta: torch.Tensor) -> None:
        token.copy_(forward(model, meta, memory).argmax(-1))
        ops.decode_meta_set_(later, token, position.add_(1))  # what the next step reads

    def launch(step: int) -> None:
        if graph is None or step < 3:
            run(first if step == 1 else later)
            return
        if step == 3:
            with torch.cuda.graph(graph):
                run(later)
        graph.replay()

    yield from read_late(launch, token, max_new_tokens, stop_ids)
