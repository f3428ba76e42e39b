"""A stream of one request, alone: our pipeline as others are timed beside it."""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks.common.session import Session
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights

SPARE = 8  # tokens that may be made beyond those that count


class Run(NamedTuple):
    """New token ids, seconds until the first, and seconds from the first to the last."""

    tokens: list[int]
    first_s: float
    rest_s: float


def run_ours(config: ModelConfig, weights: DecoderWeights, prompt: list[int], count: int) -> Run:
    """One row through the pipeline, at depth 2."""
    with Session(config, weights, [prompt], count + SPARE, depth=2) as session:
        tokens = session.tokens[session.rows[0].index]
        begin = time.perf_counter()
        session.begin()
        first, had = time.perf_counter(), len(tokens)
        while len(tokens) < count:
            session.step()
        end = time.perf_counter()
        session.check()
    decode = (end - first) * (count - 1) / max(1, count - had)
    return Run(tokens[:count], first - begin, decode)
