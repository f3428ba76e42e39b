"""Who is scheduled where nobody plans: first come, first served; prefill and decode steps take
turns, so that a stream of prompts cannot starve running rows, nor the reverse.
"""

from __future__ import annotations

from collections.abc import Iterable

from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Chunk, StepKind, StepPlan


def first_come_first_served(
    decode: tuple[Row, ...], prefill: tuple[Row, ...], previous: StepKind | None, budget: int
) -> StepPlan:
    """The next step of rows with a token to launch, and rows with some of their prompts, of at most
    ``budget`` prompt tokens, after one of kind ``previous``; empty where there are none.
    """
    if prefill and not (decode and previous is StepKind.PREFILL):
        return StepPlan((), take_chunks(prefill, budget))
    return StepPlan(decode)


def take_chunks(rows: Iterable[Row], budget: int) -> tuple[Chunk, ...]:
    """Chunks of these rows' prompts, in order, of up to `budget` tokens in all."""
    chunks: list[Chunk] = []
    for row in rows:
        if budget == 0:
            break
        tokens = min(budget, len(row.prompt_ids) - row.prefilled)
        chunks.append(Chunk(row, tokens))
        budget -= tokens
    return tuple(chunks)
