"""An engine whose linears read tokens in fp8 (`activations="fp8"`): who may have one, and what it
answers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from photon_ext import Engine, EngineOptions, SamplingParams
from photon_ext.errors import ConfigError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import (
    ExecutionMode,
    KernelPlan,
    Target,
    gpu_target,
    plan_kernels,
)
from photon_ext.models.requantize import requantized
from photon_ext.models.shapes import NAMED_SHAPES, in_fp8, in_q4_k_m
from photon_ext.models.weights import random_weights

SMALL = ModelConfig(Family.QWEN3, 256, 2, 4, 2, 64, 384, 136)
H200 = gpu_target((9, 0))


def plan_of(config: ModelConfig, target: Target = H200, **options: Any) -> KernelPlan:
    given: dict[str, Any] = {"dtype": "bfloat16", "activations": "fp8"} | options
    return plan_kernels(config, target, **given)


@pytest.mark.parametrize("config", [requantized(SMALL, "fp8"), in_fp8(NAMED_SHAPES["qwen3-8b"])])
def test_from_nine_tokens_on_a_batchs_linears_read_them(config: ModelConfig) -> None:
    plan = plan_of(config)
    assert plan.fp8_activations
    for modes in (plan.decode, plan.chunks):
        assert modes.of(8) is ExecutionMode.FUSED
        assert {modes.of(tokens) for tokens in (9, 256)} == {ExecutionMode.BATCH}
        assert modes.of(257) is ExecutionMode.TORCH
    assert not plan_of(config, activations=None).fp8_activations


@pytest.mark.parametrize(
    ("config", "target", "options", "why"),
    [
        (SMALL, H200, {}, 'no layer has weights in fp8 (quantize="fp8" rounds them)'),
        (requantized(NAMED_SHAPES["qwen3-4b"], "int4"), H200, {}, "no layer has weights in fp8"),
        (in_q4_k_m(SMALL), H200, {}, "of weights of fewer bits they read fp8, int4 and int8"),
        (requantized(SMALL, "fp8"), Target(), {}, "there is no GPU"),
        (requantized(SMALL, "fp8"), gpu_target((8, 0)), {}, "compute capability"),
        (requantized(SMALL, "fp8"), H200, {"backend": "portable"}, "the backend is portable"),
        (requantized(SMALL, "fp8"), H200, {"dtype": "float16"}, "the model is in float16"),
        (requantized(SMALL, "fp8"), H200, {"exact": True}, "exact is True"),
        (requantized(SMALL, "fp8"), H200, {"activations": "int8"}, "give 'fp8', or None"),
    ],
)
def test_where_nothing_reads_them_the_reason_is_said(
    config: ModelConfig, target: Target, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(config, target, **options)
    assert str(raised.value).startswith("activations is ")
    assert why in str(raised.value)


def test_an_engine_on_a_cpu_refuses_them() -> None:
    config = requantized(SMALL, "fp8")
    with pytest.raises(ConfigError, match='activations is "fp8", and no kernel reads them so'):
        Engine.from_weights(config, random_weights(config), None, activations="fp8")


def test_exact_engines_refuse_them_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match='activations is "fp8", and exact is True'):
        EngineOptions(activations="fp8", exact=True)


def test_a_plan_that_is_given_has_activations_of_its_own() -> None:
    with pytest.raises(ConfigError, match="kernel_plan is given, and activations is 'fp8'"):
        EngineOptions(kernel_plan=KernelPlan(), activations="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_answers_are_the_same_again_and_prompts_of_every_length_are_read(blocks: bool) -> None:
    """Of one request at a time, so that all steps are alike."""
    config = in_fp8(SMALL) if blocks else requantized(SMALL, "fp8")
    weights = random_weights(config, device="cuda")
    prompts = [[(7 * i + size) % 131 for i in range(size)] for size in (1, 9, 60, 300, 700)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Engine.from_weights(
        config, weights, None, activations="fp8", max_len=1024, prefix_cache=False
    ) as engine:
        first, again = (
            [engine.generate([prompt], params)[0] for prompt in prompts] for _ in range(2)
        )
        together = engine.generate(prompts * 5, params)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert all(one.error is None and len(one.token_ids) == 12 for one in (*first, *together))


@pytest.mark.gpu
def test_logits_of_long_prompts_are_near_those_of_short_chunks() -> None:
    """torch's products and those of a batch round the same tokens."""
    from benchmarks.common.logits import text_logits

    config = requantized(SMALL, "fp8")
    weights = random_weights(config, device="cuda")
    ids = [(7 * i) % 131 for i in range(600)]
    plain = text_logits(config, weights, ids, 600)
    long, short = (text_logits(config, weights, ids, n, activations="fp8") for n in (600, 100))
    loss = (long - plain).norm()
    assert 0 < loss < 0.2 * plain.norm()
    assert (long - short).norm() < loss
    assert torch.isfinite(long).all()
