"""transformers: continuous batching, as it comes and with its graphs asked for, and plain generate over a static cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.common.options import DTYPES
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.peer import BY_DIFFERENCE, BY_STEP, Measured, Prompts, Setup, Tokens, Window, by_difference, by_steps

CPU_PAGE, CPU_BLOCKS = 256, 64  # left alone, the cache would take the memory of the machine


class ContinuousBatching:
    """`generate_batch` with the defaults of this version; its own time stamps of each token."""

    method = BY_STEP

    def __init__(self, setup: Setup, **options: Any) -> None:
        self._model = _load(setup)
        self._options = dict(options)
        if setup.device == "cpu":
            self._options |= {"page_size": CPU_PAGE, "num_blocks": CPU_BLOCKS, "max_batch_tokens": CPU_PAGE}
        self.version = transformers.__version__
        asked = ", ".join(f"{name}={value}" for name, value in options.items())
        self.mode = f"one process, generation thread, {asked or 'defaults'}"

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        settings = GenerationConfig(max_new_tokens=window.last, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = self._model.generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(**self._options) if self._options else None,
            record_timestamps=True,
        )
        results = list(outputs.values())
        errors = [result.error for result in results if result.error is not None]
        if errors or len(results) != len(prompts):
            raise BenchmarkError(f"{len(results)} of {len(prompts)} requests came back; {errors[0] if errors else 'no reason given'}")
        times = [(after - before) * 1e3 for before, after in pairwise(results[0].timestamps)]
        return by_steps(times, [list(result.generated_tokens) for result in results], window)

    def close(self) -> None:
        del self._model


class GraphedContinuousBatching(ContinuousBatching):
    """The same with CUDA graphs and asynchronous batching asked for."""

    def __init__(self, setup: Setup) -> None:
        if setup.device != "cuda":
            raise BenchmarkError("CUDA graphs need a GPU; leave this peer out on a CPU")
        super().__init__(setup, use_cuda_graph=True, use_async_batching=True)


class StaticGenerate:
    """`generate` over a static cache, eager: the loop that people write first."""

    method = BY_DIFFERENCE
    mode = "one process, static cache, eager"

    def __init__(self, setup: Setup) -> None:
        self._model = _load(setup)
        self.version = transformers.__version__

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        return by_difference(self._generate, prompts, window)

    def _generate(self, prompts: Prompts, count: int) -> Tokens:
        ids = torch.tensor(prompts, device=self._model.device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
        )
        tokens: Tokens = out[:, ids.shape[1] :].tolist()
        return tokens

    def close(self) -> None:
        del self._model


def _load(setup: Setup) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(setup.directory, dtype=DTYPES[setup.dtype])
    return model.to(setup.device).eval()
