"""The engine with the Hopper kernels, in bfloat16: tokens depend on nothing but the request, and
are those of float32 but for near ties.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from photon_ext import ConfigError, Runtime
from photon_ext.checks import Backend
from photon_ext.engine import Engine, options
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import Target, choose_backend, gpu_target
from photon_ext.models.loading.loader import load_model
from photon_ext.models.weights import random_weights
from photon_ext.sampling import SamplingParams
from tests.engine.test_engine_models import (
    TEXTS,
    prompt_of,
    reference,  # noqa: F401 - a fixture: transformers in float32 over our weights
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = ModelConfig(Family.QWEN3, 192, 2, 6, 2, 64, 320, 203)
NEW = 12
NEAR_TIE = 0.25  # of float32 logits: what bfloat16 may turn round


def engine_on(device: str, depth: int, **changes: Any) -> Engine:
    weights = random_weights(CONFIG, torch.bfloat16, device)
    for layer in weights.layers:
        for projection in layer.projections().values():
            projection.weight.data.mul_(10)  # so that tokens are not all alike
    options = {
        "max_rows": 5,
        "max_len": 96,
        "page_size": 16,
        "buckets": (1, 2),
        "chunk": 40,
        "exact": True,
        "backend": "hopper",
    }
    return Engine.from_weights(CONFIG, weights, depth=depth, **{**options, **changes})


@pytest.mark.emulated
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_the_same_alone_batched_and_at_both_depths(device: str) -> None:
    prompts = [prompt_of(length, CONFIG.vocab) for length in (1, 9, 33, 20, 47)]
    params = [
        SamplingParams(max_new_tokens=NEW, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    runs = []
    for depth in (1, 2):
        with engine_on(device, depth) as engine:
            runs.append([output.token_ids for output in engine.generate(prompts, params)])
            runs.append(
                [
                    engine.generate([prompt], one)[0].token_ids
                    for prompt, one in zip(prompts, params, strict=True)
                ]
            )
    assert all(tokens == runs[0] for tokens in runs)
    assert len({tokens[-4:] for tokens in runs[0]}) > 1


@pytest.mark.emulated
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_the_same_alone_and_among_more_rows_than_a_launch_takes(device: str) -> None:
    """And with another chunk: prompts of 67 tokens go in one step of two launches, or in two
    steps.
    """
    prompts = [prompt_of(1 + row % 3, CONFIG.vocab) for row in range(65)] + [
        prompt_of(67, CONFIG.vocab)
    ]
    params = [
        SamplingParams(max_new_tokens=3, temperature=0.7, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with engine_on(device, 2, max_rows=len(prompts), chunk=70) as engine:
        together = [output.token_ids for output in engine.generate(prompts, params)]
    with engine_on(device, 1, chunk=40) as engine:
        for row in (0, 1, 2, 64, 65):
            (alone,) = engine.generate([prompts[row]], params[row])
            assert alone.token_ids == together[row], row


@pytest.mark.emulated
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_the_same_preempted_and_behind_cached_prompts(device: str) -> None:
    """Prompts begin alike in pairs, and 10 pages are less than half of what all need."""
    prompts = [[*prompt_of(16, CONFIG.vocab, n // 2), *range(n + 1)] for n in range(6)]
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.7 * (n % 2), seed=n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    with engine_on(device, 2, num_pages=10) as engine:
        disturbed = [output.token_ids for output in engine.generate(prompts, params)]
        now = engine.stats()
    assert now.preemptions > 0
    assert now.prefix_hit_tokens > 0
    with engine_on(device, 1, prefix_cache=False) as engine:
        calm = [output.token_ids for output in engine.generate(prompts, params)]
        assert engine.stats().preemptions == 0
    assert disturbed == calm


@pytest.mark.parametrize("device", DEVICES)
def test_i8_tokens_are_the_same_in_mixed_and_separate_steps_wherever_chunks_end(
    device: str,
) -> None:
    prompts = [prompt_of(length, CONFIG.vocab, length) for length in (1, 9, 33, 20, 47, 64, 25)]
    params = [
        SamplingParams(max_new_tokens=3 + 4 * (i % 3), temperature=0.7 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]

    def served(prefill: str, chunk: int) -> list[tuple[int, ...]]:
        options = {"prefill": prefill, "chunk": chunk, "prefill_buckets": (16, chunk)}
        with engine_on(device, 2, **options) as engine:
            return [output.token_ids for output in engine.generate(prompts, params)]

    expected = served("separate", 32)
    for chunk in (31, 32, 33):
        assert served("mixed", chunk) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_leaves_the_tokens_of_float32_only_at_near_ties(
    device: str,
    reference: LlamaForCausalLM,  # noqa: F811
    record_property: pytest.RecordProperty,
) -> None:
    loaded = load_model("smollm2", torch.bfloat16, torch.device(device))
    assert loaded.tokenizer is not None
    texts = TEXTS[::4] if device == "cpu" else TEXTS  # slow there
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    options = {
        "max_rows": 8,
        "max_len": 256,
        "buckets": (8,),
        "chunk": 64,
        "exact": True,
        "backend": "hopper",
    }
    with Engine.from_weights(loaded.config, loaded.weights, loaded.tokenizer, **options) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    others, worst = 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        behind = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
        others += int((behind > 0).sum())
        worst = max(worst, float(behind.max()))
    record_property("tokens_that_are_not_float32's", others)
    assert worst < NEAR_TIE, (
        f"{others} of {NEW * len(prompts)} tokens are not float32's first choice, one by "
        f"{worst:.2f}"
    )
    assert others < 0.1 * NEW * len(prompts)


@pytest.mark.parametrize("chosen", ["hopper", "portable"])
def test_a_choice_of_kernels_is_kept(chosen: Backend) -> None:
    assert (
        choose_backend(chosen, Target(), "float32")
        == choose_backend(chosen, gpu_target((9, 0)), "bfloat16")
        == chosen
    )


@pytest.mark.parametrize("wrong", ["fast", True, 1, ["hopper"]])
def test_a_backend_that_is_none_is_refused(wrong: Any) -> None:
    message = r"backend is .*; give 'hopper', 'portable', or None for hopper where it runs"
    with pytest.raises(ConfigError, match=message):
        options.EngineOptions(backend=wrong)
    with pytest.raises(ConfigError, match=message):
        Runtime(max_rows=1, max_len=8, device="cpu", backend=wrong)


def test_without_a_choice_the_fast_kernels_run_where_they_fit() -> None:
    h200 = gpu_target((9, 0))
    assert choose_backend(None, h200, "bfloat16") == "hopper"
    others = (
        (h200, "float32"),
        (h200, "float16"),
        (Target(runs_hopper=True), "bfloat16"),  # a CPU
        (gpu_target((8, 0)), "bfloat16"),
    )
    assert {choose_backend(None, *other) for other in others} == {"portable"}
