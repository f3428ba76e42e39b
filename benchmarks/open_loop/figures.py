"""What a run took: latencies from the intended arrival, and rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.open_loop.client import Run
from benchmarks.open_loop.loads import Ask

Spread = dict[str, float]
PERCENTILES = (50, 95, 99)


def spread(seconds: Any) -> Spread | None:
    """Percentiles (linear between two values) and the most, milliseconds; None without values."""
    if len(seconds) == 0:
        return None
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    values = np.percentile(ms, PERCENTILES).tolist()
    named = {f"p{share}": value for share, value in zip(PERCENTILES, values, strict=True)}
    return {**named, "max": float(ms.max())}


def figures(asks: Sequence[Ask], run: Run) -> dict[str, Any]:
    """TTFT: from when a request was due to its first token. Inter-token latency: between two
    tokens of a request; tokens that were handed over together have 0 between them. Both are when
    the client had them. `queue_s`: TTFT's 99th percentile above the least TTFT of the run, which
    stands for a request that waited for nobody. `late_ms`: how late the client submitted.
    """
    due = np.array(run.due)
    ttft = np.array([times[0] for times in run.times]) - due
    ended = np.array([times[-1] for times in run.times])
    wall_s, tokens = float(ended.max() - due.min()), sum(map(len, run.times))
    turns = np.array([ask.turn for ask in asks])
    return {
        "requests": len(asks),
        "tokens": tokens,
        "wall_s": wall_s,
        "busy_s": busy_seconds(due, ended),
        "tokens_per_s": tokens / wall_s,
        "requests_per_s": len(asks) / wall_s,
        "ttft_ms": spread(ttft),
        "ttft_by_turn": {turn: spread(ttft[turns == turn]) for turn in sorted(set(turns.tolist()))},
        "inter_token_ms": spread(np.concatenate([np.diff(times) for times in run.times])),
        "queue_s": float(np.percentile(ttft, 99) - ttft.min()),
        "late_ms": spread(np.array(run.sent) - due),
    }


def busy_seconds(begins: Any, ends: Any) -> float:
    """How long at least one of the spans [begin, end] was open."""
    order = np.argsort(begins)
    begins, ends = begins[order], ends[order]
    open_until = np.maximum.accumulate(np.concatenate([begins[:1], ends[:-1]]))
    return float(np.maximum(ends - np.maximum(begins, open_until), 0.0).sum())
