"""Many requests at once, of which some are cancelled, some time out, and all want pages that are
not there: what must hold of each.
"""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from photon_ext.engine import Engine, Request
from photon_ext.observe.meter import MeterSnapshot
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.test_engine_fast import engine_on
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import VOCAB, saved_tiny_model

KINDS = 48
IN_FLIGHT = 64
ROWS = 12


class Asked(NamedTuple):
    """A request, and what an undisturbed run of it gives."""

    prompt: list[int]
    params: SamplingParams
    tokens: tuple[int, ...]
    reason: str


Make = Callable[..., Engine]  # of a depth and options


def kinds(make: Make) -> list[Asked]:
    """Requests of all kinds: shared beginnings, stops, caps, temperatures, filters, constraints."""
    rng, filters, asked = random.Random(1), random.Random(1), []
    beginnings = [prompt_of(15, VOCAB, seed) for seed in range(3)]
    for index in range(KINDS):
        prompt = rng.choice(beginnings)[: rng.randint(0, 15)] + prompt_of(rng.randint(1, 12), VOCAB)
        allowed = from_allowed_ids(range(40, 80)) if index % 7 == 0 else None
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 3, 20, 37]),
            temperature=rng.choice([0.0, 1.0]),
            seed=index,
            top_k=filters.choice([0, 20]),
            top_p=filters.choice([1.0, 0.9]),
            presence_penalty=filters.choice([0.0, 0.0, 1.0]),
            repetition_penalty=filters.choice([1.0, 1.0, 1.3]),
            logprobs=filters.choice([None, None, 0, 2]),
            logit_bias=filters.choice([{}, {3: 1.5, 60: float("-inf")}]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 6]))),
            constraint=allowed,
        )
        asked.append((prompt, params))
    with make(1, prefix_cache=False, num_pages=200) as engine:
        outputs = [engine.generate([prompt], params)[0] for prompt, params in asked]
        assert engine.stats().preemptions == 0
    return [
        Asked(prompt, params, output.token_ids, output.finish_reason)
        for (prompt, params), output in zip(asked, outputs, strict=True)
    ]


def check(request: Request, asked: Asked, disturbed: bool) -> None:
    """One end, and the tokens of an undisturbed run, or the first of them."""
    output = request.result(60)
    asks = asked.params.logprobs is not None
    assert len(output.logprobs) == (len(output.token_ids) if asks else 0)
    assert sum(event.finish_reason is not None for event in request.iter()) == 1
    if disturbed and output.finish_reason in ("cancelled", "timeout"):
        assert output.token_ids == asked.tokens[: len(output.token_ids)]
    else:
        assert (output.token_ids, output.finish_reason) == (asked.tokens, asked.reason)


def survive(folder: Path, device: str, count: int, depth: int) -> MeterSnapshot:
    """Serves so many requests of a float32 model; see `survive_on`."""
    saved_tiny_model("qwen3-6-3-24", folder)
    # 64 in flight have about 3 pages each and up to 10 at their caps; 12 rows about 5
    pages = ROWS * 5 // 2
    make = partial(tiny_engine, folder, device=device)
    return survive_on(make, device, count, depth, exact=depth == 2, num_pages=pages)


def survive_fast(device: str, count: int) -> MeterSnapshot:
    """The same with the Hopper kernels, in bfloat16, whose pages have three times the tokens."""
    return survive_on(partial(engine_on, device), device, count, 2, num_pages=ROWS // 2)


def survive_on(make: Make, device: str, count: int, depth: int, **options: object) -> MeterSnapshot:
    """Serves so many requests, which want twice the pages that there are; memory stays flat."""
    asked, rng = kinds(make), random.Random(depth)
    # named, so that steps with prompts are graphs on a GPU, too, and mixed
    sizes = {"max_rows": ROWS, "chunk": 16, "prefill_buckets": (8, 16)}
    with make(depth, **sizes, **options) as engine:
        memory: list[tuple[int, int]] = []
        for begin in range(0, count, IN_FLIGHT):
            _wave(engine, asked, rng)
            if begin % (8 * IN_FLIGHT) == 0:
                memory.append(_memory(device))
        engine.close()  # zombies come back by then
        now = engine.stats()
        assert (now.live, now.waiting, now.pages_held) == (0, 0, 0)
        assert now.pages_free + now.pages_cached == now.pages
    _check_flat(memory)
    return now


def _wave(engine: Engine, asked: Sequence[Asked], rng: random.Random) -> None:
    running: list[tuple[Request, Asked, bool]] = []
    for _ in range(IN_FLIGHT):
        one, fate = rng.choice(asked), rng.random()
        timeout = rng.choice([0.0, 0.002, 0.02]) if fate < 0.1 else None
        request = engine.submit(one.prompt, one.params, timeout_s=timeout)
        running.append((request, one, timeout is not None))
        if 0.1 <= fate < 0.3:
            chosen = rng.randrange(len(running)) if fate < 0.2 else -1
            cancelled, its, _ = running[chosen]
            cancelled.cancel()
            running[chosen] = (cancelled, its, True)
    for each in running:
        check(*each)


def _memory(device: str) -> tuple[int, int]:
    """Peak resident KiB of the process, and the device's allocated bytes."""
    gc.collect()
    used = torch.cuda.memory_allocated() if device == "cuda" else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, used


def _check_flat(memory: Sequence[tuple[int, int]]) -> None:
    """From the second look on: the first waves fill caches."""
    later = memory[1:]
    if len(later) > 1:
        assert later[-1][0] - later[0][0] < 20 * 1024, "the host's memory grows"
        assert len({used for _, used in later}) == 1, "the device's memory grows"
