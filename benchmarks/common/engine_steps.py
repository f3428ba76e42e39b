"""Decode through the whole engine, and forwards of whole prompts."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import torch

from benchmarks.attribution.steps import logged_steps
from benchmarks.common.result import BenchmarkError
from benchmarks.common.session import Session, random_prompts
from benchmarks.kernel_cases.linears import projections
from photon_ext import Engine, SamplingParams
from photon_ext.checks import Activations, Backend, KvDtype
from photon_ext.models.config import ModelConfig
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime.step import StepKind

PROMPT = 64
ANSWERS = {"cuda": (64, 384), "cpu": (8, 24)}  # tokens, of the two lengths that are compared
WARM_UP, REPEATS = 16, 2
PROMPTS, FIRST = 10, 2  # of a window of prefill steps, and those left out of it
PRODUCT = {"cuda": 8192, "cpu": 512}  # rows and columns of a large matrix product


def through_engine(
    config: ModelConfig,
    weights: DecoderWeights,
    batch: int,
    exact: bool,
    kv_dtype: KvDtype | None = None,
    activations: Activations | None = None,
) -> dict[str, Any]:
    """ms per step of `batch` requests at once, all of the engine's own work included: the time of
    long answers less that of short ones, each the best of REPEATS, by the steps between them.
    Prompts are others each time.
    """
    short, long = ANSWERS[weights.device.type]
    length = PROMPT + long
    sizes: dict[str, Any] = {"max_rows": batch, "max_len": length, "buckets": (batch,)}
    sizes |= {"exact": exact, "kv_dtype": kv_dtype, "activations": activations}
    seeds = iter(range(1 + 2 * REPEATS))

    def seconds(engine: Engine, count: int) -> float:
        prompts = random_prompts(config.vocab, batch, PROMPT, next(seeds))
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        outputs = engine.generate(prompts, params)
        taken = time.perf_counter() - begin
        if any(len(output.token_ids) != count for output in outputs):
            raise BenchmarkError(f"answers are not of {count} tokens: {outputs[0].error}")
        return taken

    with Engine.from_weights(config, weights, None, **sizes) as made:
        seconds(made, min(WARM_UP, short))
        least = {n: min(seconds(made, n) for _ in range(REPEATS)) for n in (short, long)}
        now = made.stats()
    del made
    if weights.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "ms_per_step": (least[long] - least[short]) / (long - short) * 1e3,
        "context": PROMPT + (short + long) / 2,
        "seconds_of_answers": {str(count): taken for count, taken in least.items()},
        "gap_us": {"p50": now.step_gap_us, "p99": now.step_gap_p99_us},
    }


def prefill_forward(
    config: ModelConfig,
    weights: DecoderWeights,
    chunk: int,
    backend: Backend,
    exact: bool,
    activations: Activations | None = None,
) -> dict[str, Any]:
    """A captured step of one whole prompt of `chunk` tokens, by the device's events. Its rate
    counts the layers' linears alone: 2 x weights x tokens; its time has attention and the head of
    one token, too. Beside it the rate of one large matrix product.
    """
    prompts = random_prompts(config.vocab, PROMPTS, chunk)
    options: dict[str, Any] = {"depth": 2, "chunk": chunk, "captured": True, "timing": True}
    options |= {"backend": backend, "exact": exact, "activations": activations}
    with Session(config, weights, prompts, 32, **options) as one:
        with logged_steps(2) as log:
            one.begin()
        one.check()
    steps = [step.device_us for step in log.steps if step.kind is StepKind.PREFILL]
    times = [us for us in steps[FIRST:] if us is not None]
    if len(steps) != PROMPTS or not times:
        raise BenchmarkError(f"{PROMPTS} prompts took {len(steps)} prefill steps")
    matrices = [each.n * each.k for each in projections(config) if each.what != "lm_head"]
    flops, us = 2 * config.layers * sum(matrices) * chunk, median(times)
    rate, product = flops / us * 1e-6, product_rate(weights.device, weights.dtype)
    return {
        "ms": us / 1e3,
        "tokens_per_s": chunk / us * 1e6,
        "tflop_per_s": rate,
        "product_tflop_per_s": product,
        "share": rate / product,
    }


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product by torch, the best of some."""
    size, times = PRODUCT[device.type], []
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times) * 1e-12
