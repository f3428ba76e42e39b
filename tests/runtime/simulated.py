"""Pipelines on the simulated device, requests of every kind, and random plans."""

from __future__ import annotations

import random
from collections.abc import Iterable

from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Chunk, StepPlan
from photon_ext.testing import Driver, Request, SimRuntime, ToyForward, ToyModel

MODEL = ToyModel(32)


def follow(tokens: tuple[int, ...]) -> set[int]:
    return {len(tokens), 16 + len(tokens)}


def requests(count: int, seed: int = 0, constrained: bool = True) -> list[Request]:
    """A mixed bag: lengths, stops, temperatures, filters, constraints."""
    rng, filters = random.Random(seed), random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(32) for _ in range(rng.randint(1, 12))),
            rng.randint(1, 9),
            stop_token_ids=tuple(rng.sample(range(32), rng.randint(0, 4))),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
            seed=rng.getrandbits(64),
            top_k=filters.choice([0, 0, 3]),
            top_p=filters.choice([1.0, 0.8]),
            min_p=filters.choice([0.0, 0.1]),
            allowed=follow if constrained and rng.random() < 0.3 else None,
        )
        for _ in range(count)
    ]


def pipeline(runtime: SimRuntime, **options: object) -> Pipeline:
    return Pipeline(runtime, ToyForward(runtime), vocab_size=32, **options)  # type: ignore[arg-type]


def traced(driver: Driver, *prefixes: str) -> list[str]:
    runtime = driver._runtime
    assert isinstance(runtime, SimRuntime)
    return [entry for entry in runtime.device.trace if entry.startswith(prefixes)]


def numbers(entries: Iterable[str]) -> list[int]:
    return [int(entry.split()[-1]) for entry in entries]


def random_plan(pipe: Pipeline, rng: random.Random, most: int) -> StepPlan:
    """Some of the rows that decode, in any order, and chunks of some of the others."""

    def some(rows: tuple[Row, ...]) -> list[Row]:
        """Most often all of them."""
        count = len(rows) if rng.random() < 0.7 else rng.randint(0, len(rows))
        return rng.sample(rows, count)

    chunks, left = [], most
    for row in some(pipe.running_set.prefill):
        tokens = rng.randint(1, len(row.prompt_ids) - row.prefilled)
        if tokens <= left:
            chunks.append(Chunk(row, tokens))
            left -= tokens
    return StepPlan(tuple(some(pipe.running_set.decode)), tuple(chunks))
