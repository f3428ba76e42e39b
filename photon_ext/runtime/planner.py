"""Which rows ride in the next step: first come, first served; prefill and decode steps take
turns.
"""

from __future__ import annotations

from collections.abc import Collection

from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Segment, StepKind


def plan(
    rows: Collection[Row], previous: StepKind | None, chunk: int
) -> tuple[StepKind, tuple[Segment, ...]] | None:
    """The next step's kind and segments, or None when no row can be launched.

    When both kinds of work wait they alternate, so that a stream of prompts cannot starve running
    rows, nor the reverse.

    Args:
        rows: running rows in order of admission.
        previous: kind of the step launched last.
        chunk: prompt tokens that one prefill step may carry.
    """
    wants_prefill = any(row.wants_prefill for row in rows)
    decode = tuple(
        Segment(row, row.next_position, 1, True, None) for row in rows if row.wants_decode
    )
    if wants_prefill and not (decode and previous is StepKind.PREFILL):
        return StepKind.PREFILL, _prefill_segments(rows, chunk)
    return (StepKind.DECODE, decode) if decode else None


def _prefill_segments(rows: Collection[Row], chunk: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    budget = chunk
    for row in rows:
        if budget == 0:
            break
        if not row.wants_prefill:
            continue
        end = min(row.prefilled + budget, len(row.prompt_ids))
        tokens = row.prompt_ids[row.prefilled : end]
        segments.append(
            Segment(row, row.prefilled, len(tokens), end == len(row.prompt_ids), tokens)
        )
        budget -= len(tokens)
    return tuple(segments)
