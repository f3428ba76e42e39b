"""Figures: what a run took, in the terms of serving."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from photon_ext.bench.connection import Answer
from photon_ext.bench.run import Outcome

PERCENTILES = (50, 90, 99)
Spread: TypeAlias = "dict[str, float] | None"


@dataclass(frozen=True)
class Figures:
    """Of one run. A spread has percentiles and the most, in milliseconds; None without values.

    Attributes:
        requests, failed: how many were sent; why how many of them failed.
        short: answers of fewer tokens than were asked for. uncounted: those without usage, whose
            events are counted as tokens.
        tokens, prompt_tokens, wall_s: of answers that did not fail, from the begin to the last end.
        tokens_per_s, requests_per_s: over that time.
        ttft_ms: from when a request was due to its first token.
        tpot_ms: of each request of two tokens and more, the mean time of a token behind the first.
        gap_ms: between two events of an answer, which may have several tokens.
        e2e_ms: from when a request was due to its end.
        client_busy: share of the time for which the busiest client process computed.
    """

    requests: int
    failed: dict[str, int]
    short: int
    uncounted: int
    tokens: int
    prompt_tokens: int
    wall_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    gap_ms: Spread
    e2e_ms: Spread
    client_busy: float

    @classmethod
    def of(cls, outcome: Outcome) -> Figures:
        whole = [one for one in outcome.answers if one.error is None and one.times]
        failed = Counter(
            one.error or "no text came"
            for one in outcome.answers
            if one.error is not None or not one.times
        )
        counts = [_tokens(one) for one in whole]
        end = max((one.ended for one in outcome.answers), default=outcome.begin)
        wall_s = max(end - outcome.begin, 1e-9)
        counted = [*zip(whole, counts, strict=True)]
        return cls(
            requests=len(outcome.answers),
            failed=dict(failed),
            short=sum(count < one.asked for one, count in counted),
            uncounted=sum(one.tokens is None for one in whole),
            tokens=sum(counts),
            prompt_tokens=sum(one.prompt_tokens or 0 for one in whole),
            wall_s=wall_s,
            tokens_per_s=sum(counts) / wall_s,
            requests_per_s=len(whole) / wall_s,
            ttft_ms=spread([one.times[0] - one.due for one in whole]),
            tpot_ms=spread([(a.times[-1] - a.times[0]) / (n - 1) for a, n in counted if n > 1]),
            gap_ms=spread([gap for one in whole for gap in np.diff(one.times)]),
            e2e_ms=spread([one.ended - one.due for one in whole]),
            client_busy=outcome.busy,
        )


def spread(seconds: ArrayLike) -> Spread:
    """Percentiles, linear between two values, and the most."""
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    if not ms.size:
        return None
    values = np.percentile(ms, PERCENTILES).tolist()
    named = {f"p{share}": value for share, value in zip(PERCENTILES, values, strict=True)}
    return {**named, "max": float(ms.max())}


def _tokens(answer: Answer) -> int:
    return len(answer.times) if answer.tokens is None else answer.tokens
