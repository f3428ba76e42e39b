"""Prompts beside decode rows, or in steps of their own: the same tokens, and neither starves."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from photon_ext.engine import Engine
from photon_ext.errors import ConfigError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.weights import random_weights
from photon_ext.runtime import Pipeline, StepKind
from photon_ext.runtime.step import Step, StepPlan
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.testing import ToyForward
from tests.conftest import EXAMPLES
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import WatchedDevice, engine_of, engine_on, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
CONFIG = ModelConfig(
    family=Family.LLAMA,
    hidden=256,
    layers=4,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    vocab=512,
    tied_embeddings=True,
)
WEIGHTS = random_weights(CONFIG, torch.float32)


@contextmanager
def steps_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """The steps that pipelines launch meanwhile."""
    steps: list[Step] = []
    launch = Pipeline.launch

    def watched(pipe: Pipeline, plan: StepPlan | None = None) -> Step | None:
        step = launch(pipe, plan)
        steps.extend([step] if step is not None else [])
        return step

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "launch", watched)
        yield steps


def simulated(depth: int, prefill: str, **options: Any) -> Engine:
    return engine_on(WatchedDevice(depth=depth), **{"prefill": prefill, "chunk": 8, **options})


def kinds(steps: list[Step]) -> Counter[StepKind]:
    return Counter(step.key.kind for step in steps)


@DEPTHS
@pytest.mark.parametrize("prefill", ["mixed", "separate"])
def test_which_kinds_of_steps_there_are(
    prefill: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2], list(range(30)), [3] * 11, [4]]
    with simulated(depth, prefill) as engine, steps_of(monkeypatch) as steps:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, 12, VOCAB)
    mixes = prefill == "mixed"
    assert (StepKind.MIXED in kinds(steps)) == mixes
    for step in steps[1:]:
        assert not mixes or step.key.kind is not StepKind.PREFILL


@pytest.mark.parametrize(
    ("options", "mixes"),
    [
        ({"prefill": None}, True),
        ({"prefill": None, "graph": False}, False),
        ({"prefill": None, "prefill_buckets": ()}, False),
        ({"prefill": "mixed", "graph": False}, True),
        ({"prefill": "mixed", "prefill_buckets": ()}, True),
        ({}, False),
    ],
)
def test_prompts_ride_beside_decode_rows_where_such_steps_are_captured(
    options: dict[str, Any], mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless told; an engine from parts has to be told, as its forward needs more room."""
    device = WatchedDevice()
    forward = ToyForward(device, VOCAB)
    made = engine_of(device, forward, VOCAB, 64, chunk=8, **options)
    with made as engine, steps_of(monkeypatch) as steps:
        engine.generate([[1], list(range(30))], SamplingParams(max_new_tokens=9))
    assert (StepKind.MIXED in kinds(steps)) == mixes


@pytest.mark.parametrize(
    ("options", "message"),
    [({"prefill": "both"}, "prefill is 'both'"), ({"max_tokens_per_step": 0}, "step is 0; give")],
)
def test_an_engine_from_parts_checks_what_it_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(1, **{"prefill": "mixed", **options})


@DEPTHS
def test_hazard_28_neither_prompts_nor_decode_rows_starve_under_a_small_cap(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows decode where a step may have two tokens, beside a long prompt."""
    prompts, caps = [[0], [1], [2], [7] * 12], (60, 60, 60, 2)
    with (
        simulated(depth, "mixed", max_tokens_per_step=2, chunk=2) as engine,
        steps_of(monkeypatch) as steps,
    ):
        outputs = engine.generate(prompts, [SamplingParams(max_new_tokens=cap) for cap in caps])
    for prompt, cap, output in zip(prompts, caps, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, cap, VOCAB)
    # 15 prompt tokens, two in every step, and the decode rows in every step but the first
    carried = [sum(chunk.num_tokens for chunk in step.chunks) for step in steps]
    assert carried[:9] == [2] * 7 + [1, 0]
    assert [len(step.rows) - len(step.chunks) for step in steps[:8]] == [0, 2, 3, 3, 3, 3, 3, 3]


@DEPTHS
@pytest.mark.parametrize("prefill", ["mixed", "separate"])
def test_a_step_of_prompts_alone_is_capped_too(
    prefill: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(20)), [7] * 12]
    with (
        simulated(depth, prefill, max_tokens_per_step=5) as engine,
        steps_of(monkeypatch) as steps,
    ):
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=4))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, 4, VOCAB)
    alone = [step for step in steps if step.key.kind is StepKind.PREFILL]
    carried = [sum(chunk.num_tokens for chunk in step.chunks) for step in alone]
    assert carried[:4] == [5] * 4
    assert max(carried) == 5


@DEPTHS
@pytest.mark.parametrize("seed", range(3 * EXAMPLES))
def test_i8_mixed_steps_give_the_tokens_of_separate_ones(seed: int, depth: int) -> None:
    """Real kernels in fp32, lengths of every kind, constraints, noise; some requests leave."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    asked = [
        (rng.randint(1, 24), rng.choice([0.0, 0.9]), rng.random() < 0.25, rng.random() < 0.25)
        for _ in prompts
    ]

    def served(prefill: str, chunk: int) -> list[tuple[int, ...] | None]:
        with Engine.from_weights(
            CONFIG, WEIGHTS, max_rows=5, max_len=96, depth=depth, chunk=chunk, prefill=prefill
        ) as engine:
            requests = []
            for prompt, (count, temperature, constrained, _) in zip(prompts, asked, strict=True):
                constraint = from_allowed_ids(range(0, 512, 3)) if constrained else None
                params = SamplingParams(
                    count, temperature=temperature, seed=7, constraint=constraint, ignore_eos=True
                )
                requests.append(engine.submit(prompt, params))
            leaving = [one for one, (*_, leaves) in zip(requests, asked, strict=True) if leaves]
            for request in leaving:
                request.cancel()
            outputs = [request.result().token_ids for request in requests]
            return [
                None if request in leaving else tokens
                for request, tokens in zip(requests, outputs, strict=True)
            ]

    expected = served("separate", 32)
    for chunk in (31, 32, 33):
        assert served("mixed", chunk) == expected


def test_eight_requests_at_once_are_faster_than_one_after_the_other() -> None:
    """By how much is a matter of the machine: `make demo`'s model shows 2.5 times and more. The
    processor's time is compared, which other work does not lengthen.
    """
    lengths = (16, 40, 64, 24, 120, 200, 8, 30)
    prompts = [[(i * 37 + j * 11) % 512 for j in range(n)] for i, n in enumerate(lengths)]
    params = [SamplingParams(40 + n % 13, ignore_eos=True) for n in lengths]
    with Engine.from_weights(CONFIG, WEIGHTS, max_rows=8, max_len=256) as engine:
        engine.generate(prompts, params)
        seconds = []
        for at_once in (False, True, False, True):
            begin = time.process_time()
            if at_once:
                outputs = engine.generate(prompts, params)
            else:
                alone = [engine.generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
            seconds.append(time.process_time() - begin)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert min(seconds[1::2]) < 0.8 * min(seconds[::2])
