"""transformers: continuous batching, as it comes and with its graphs asked for, and plain
generate over a static cache.
"""

from __future__ import annotations

import os
from dataclasses import fields
from itertools import pairwise
from statistics import median
from typing import Any

# before the import: where it finds no flash attention it looks for one on the hub
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.common.options import DTYPES
from benchmarks.common.result import BenchmarkError
from benchmarks.engines.peer import (
    BY_DIFFERENCE,
    BY_STEP,
    Measured,
    Prompts,
    Setup,
    Tokens,
    Window,
    by_difference,
    by_steps,
)

BLOCK = 256  # tokens, what it takes if nothing is said
# What a block's size is called: in 5.17 and before, and since.
BLOCK_SIZE = (
    "page_size"
    if "page_size" in {field.name for field in fields(ContinuousBatchingConfig)}
    else "block_size"
)


class ContinuousBatching:
    """`generate_batch` with the defaults of this version; its own time stamps of each token."""

    method = BY_STEP

    def __init__(self, setup: Setup) -> None:
        self._model, self._setup = _load(setup), setup
        self.version = transformers.__version__
        self.mode = (
            f"one process, generation thread, {self._model.config._attn_implementation} "
            f"attention, {self._asked()}"
        )

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        tried, _ = self._generate(prompts, window.within(0.0, 1.0).last)
        window = window.within(self._setup.seconds, median(tried))
        return by_steps(*self._generate(prompts, window.last), window)

    def close(self) -> None:
        del self._model

    def _asked(self) -> str:
        return "defaults"

    def _options(self, batch: int) -> dict[str, Any]:
        """Left alone, the cache would take the memory of the machine."""
        return {} if self._setup.device == "cuda" else sized(batch, self._setup.window)

    def _generate(self, prompts: Prompts, count: int) -> tuple[list[float], Tokens]:
        """The time of every step in milliseconds, and the tokens."""
        options = self._options(len(prompts))
        outputs = self._model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**options) if options else None,
            record_timestamps=True,
        )
        results = list(outputs.values())
        errors = [result.error for result in results if result.error is not None]
        if errors or len(results) != len(prompts):
            raise BenchmarkError(
                f"{len(results)} of {len(prompts)} requests came back; "
                f"{errors[0] if errors else 'no reason given'}"
            )
        # until it ends all rows are there
        stamps = min((result.timestamps for result in results), key=lambda stamps: stamps[-1])
        return [(after - before) * 1e3 for before, after in pairwise(stamps)], [
            list(result.generated_tokens) for result in results
        ]


class GraphedContinuousBatching(ContinuousBatching):
    """The same with CUDA graphs and asynchronous batching asked for, and a cache and paddings as
    large as the batch needs.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.device != "cuda":
            raise BenchmarkError("CUDA graphs need a GPU; leave this peer out on a CPU")
        super().__init__(setup)

    def _asked(self) -> str:
        return "use_cuda_graph, use_async_batching, cache and paddings for the batch"

    def _options(self, batch: int) -> dict[str, Any]:
        return {
            "use_cuda_graph": True,
            "use_async_batching": True,
            **sized(batch, self._setup.window),
        }


def sized(batch: int, window: Window) -> dict[str, Any]:
    """A cache a quarter larger than the rows need, about two prompts a step, and graphs for few
    lengths.

    Without flash attention each step has a mask of lines by cache, which asynchronous batching
    keeps on the host and sends whole, and a graph reads as many keys as its length is padded to: 12
    GB and 16,384 keys if nothing is said.
    """
    blocks = -(-(window.prompt + window.last) // BLOCK)
    return {
        BLOCK_SIZE: BLOCK,
        "num_blocks": 5 * batch * blocks // 4 + 4,
        "max_batch_tokens": max(2 * window.prompt, batch),
        "q_padding_interval_size": 8,
        "kv_padding_interval_size": max(BLOCK, 64 * batch),
    }


class StaticGenerate:
    """`generate` over a static cache, eager: the loop that people write first."""

    method = BY_DIFFERENCE
    mode = "one process, static cache, eager"

    def __init__(self, setup: Setup) -> None:
        self._model, self._seconds = _load(setup), setup.seconds
        self.version = transformers.__version__

    def measure(self, prompts: Prompts, window: Window) -> Measured:
        return by_difference(self._generate, prompts, window, self._seconds)

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
