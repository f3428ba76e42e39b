"""Serving as users get it: the engine, its thread and its loop, on requests with a stop set."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.attribution.steps import StepLog, logged_steps
from benchmarks.common.result import BenchmarkError
from photon_ext.engine import Engine
from photon_ext.engine.options import MAX_STOP_IDS
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights
from photon_ext.sampling import SamplingParams

PAGE_SIZE = 16
LONGEST = 6  # a request is capped at this many mean lengths: e^-6 of them reach it
DRAIN_S = 30.0  # zombies of the last requests are gone long before


@dataclass(frozen=True)
class Load:
    """What is asked of an engine.

    Attributes:
        streams: rows of the engine. requests: requests per row.
        prompt: tokens of each prompt, random ids.
        length: mean tokens of a request, from a stop set of 1/length of the vocabulary; None: no
            stop set, `new_tokens` each.
        new_tokens: cap of each request.
        temperature: of the sampling.
    """

    streams: int
    requests: int
    prompt: int
    length: int | None
    new_tokens: int
    temperature: float

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step."""
        return min(512, self.streams * self.prompt)

    @property
    def prompt_steps(self) -> float | None:
        """Prefill steps that a prompt fills, of answers that end by their cap; else None."""
        return self.prompt / self.chunk if self.length is None else None

    def stop_ids(self, vocab: int) -> tuple[int, ...]:
        """The stop set: the same for all requests and runs."""
        if self.length is None:
            return ()
        count = max(1, round(vocab / self.length))
        if count > MAX_STOP_IDS:
            raise BenchmarkError(
                f"1/{self.length} of a vocabulary of {vocab} are {count} stop ids; "
                f"an engine takes {MAX_STOP_IDS}"
            )
        return tuple(random.Random(0).sample(range(vocab), count))

    def asked(self, vocab: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters; the same for the same seed."""
        choose, stops = random.Random(seed), self.stop_ids(vocab)
        count = range(self.streams * self.requests)
        prompts = [[choose.randrange(vocab) for _ in range(self.prompt)] for _ in count]
        params = [
            SamplingParams(
                max_new_tokens=self.new_tokens,
                temperature=self.temperature,
                seed=choose.getrandbits(32),
                stop_token_ids=stops,
                ignore_eos=True,
            )
            for _ in count
        ]
        return prompts, params


class Served(NamedTuple):
    """One run: its steps, and what came out.

    Attributes:
        log: its steps. tokens: of all requests. lengths: of each.
        stopped: requests that a stop token ended.
        gap_s: sum of the run's step gaps, seconds; 0 without timing.
        digest: a number that equal tokens give.
    """

    log: StepLog
    tokens: int
    lengths: list[int]
    stopped: int
    gap_s: float
    digest: int


@contextmanager
def open_server(
    config: ModelConfig, weights: DecoderWeights, load: Load, depth: int, **options: bool
) -> Iterator[Engine]:
    """An engine without a tokenizer for `load`, the largest that it is to serve; its memory is
    freed at the end. `options`: timing, meter, blocking and backend of EngineOptions."""
    longest = load.prompt + load.new_tokens
    engine = Engine.from_weights(
        config,
        weights,
        max_rows=load.streams,
        max_len=longest,
        depth=depth,
        page_size=PAGE_SIZE,
        num_pages=load.streams * -(-longest // PAGE_SIZE),
        chunk=load.chunk,
        prefill="separate",
        prefill_buckets=tuple(_doubling(min(load.prompt, load.chunk), load.chunk)),
        max_stop_ids=max(1, len(load.stop_ids(config.vocab))),
        prefix_cache=False,  # each round has the same prompts
        **options,
    )
    try:
        yield engine
    finally:
        engine.close()
        del engine
        if weights.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def serve(engine: Engine, load: Load, seed: int) -> Served:
    """Serves a load, all of it queued at once. Raises BenchmarkError where a request fails."""
    prompts, params = load.asked(engine.vocab_size, seed)
    gap_s = engine.stats().gap_s
    with logged_steps(engine.depth) as log:
        outputs = engine.generate(prompts, params)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise BenchmarkError(f"a request failed: {failed}")
        drain(engine)
    lengths = [len(output.token_ids) for output in outputs]
    return Served(
        log=log,
        tokens=sum(lengths),
        lengths=lengths,
        stopped=sum(output.finish_reason == "stop" for output in outputs),
        gap_s=engine.stats().gap_s - gap_s,
        digest=hash(tuple(output.token_ids for output in outputs)),
    )


def drain(engine: Engine) -> None:
    """Waits for the zombies of the last requests."""
    deadline = time.monotonic() + DRAIN_S
    while engine.stats().rows_held:
        if time.monotonic() > deadline:
            raise BenchmarkError("rows of requests that have ended are not given back")
        time.sleep(1e-3)


def _doubling(first: int, last: int) -> Sequence[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
