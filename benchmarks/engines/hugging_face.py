"""transformers: continuous batching, as it comes and with its graphs asked for, and plain generate
over a static cache."""

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

from benchmarks.common.result import BenchmarkError
from benchmarks.engines import peer

BLOCK = 256  # tokens, what it takes if nothing is said
# What a block's size is called: in 5.17 and before, and since.
_FIELDS = {field.name for field in fields(ContinuousBatchingConfig)}
BLOCK_SIZE = "page_size" if "page_size" in _FIELDS else "block_size"


class ContinuousBatching:
    """`generate_batch` with the defaults of this version; its own time stamps of each token."""

    method = peer.BY_STEP
    asked = "defaults"

    def __init__(self, setup: peer.Setup) -> None:
        self._model, self._setup = _load(setup), setup
        self.version = transformers.__version__
        attention = self._model.config._attn_implementation
        self.mode = f"one process, generation thread, {attention} attention, {self.asked}"

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        tried, _ = self._generate(prompts, window.within(0.0, 1.0).last)
        window = window.within(self._setup.seconds, median(tried))
        return peer.by_steps(*self._generate(prompts, window.last), window)

    def close(self) -> None:
        del self._model

    def _options(self, batch: int) -> dict[str, Any]:
        """Left alone, the cache would take the memory of the machine."""
        return {} if self._setup.device == "cuda" else sized(batch, self._setup.window)

    def _generate(self, prompts: peer.Prompts, count: int) -> tuple[list[float], peer.Tokens]:
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
            why = errors[0] if errors else "no reason given"
            raise BenchmarkError(f"{len(results)} of {len(prompts)} requests came back; {why}")
        # Those of the request that ends first: until then all rows are there.
        stamps = min((result.timestamps for result in results), key=lambda stamps: stamps[-1])
        times = [(after - before) * 1e3 for before, after in pairwise(stamps)]
        return times, [list(result.generated_tokens) for result in results]


class GraphedContinuousBatching(ContinuousBatching):
    """The same with CUDA graphs and asynchronous batching asked for, and a cache and paddings as
    large as the batch needs."""

    asked = "use_cuda_graph, use_async_batching, cache and paddings for the batch"

    def __init__(self, setup: peer.Setup) -> None:
        if setup.device != "cuda":
            raise BenchmarkError("CUDA graphs need a GPU; leave this peer out on a CPU")
        super().__init__(setup)

    def _options(self, batch: int) -> dict[str, Any]:
        asked = {"use_cuda_graph": True, "use_async_batching": True}
        return {**asked, **sized(batch, self._setup.window)}


def sized(batch: int, window: peer.Window) -> dict[str, Any]:
    """A cache a quarter larger than rows need, about two prompts a step, graphs for few lengths.

    Without flash attention each step has a mask of tokens by cache, which asynchronous batching
    keeps on the host and sends whole, and a graph reads as many keys as its length is padded to:
    12 GB and 16,384 keys if nothing is said.
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

    method = peer.BY_DIFFERENCE
    mode = "one process, static cache, eager"

    def __init__(self, setup: peer.Setup) -> None:
        self._model, self._seconds = _load(setup), setup.seconds
        self.version = transformers.__version__

    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        return peer.by_difference(self._generate, prompts, window, self._seconds)

    def _generate(self, prompts: peer.Prompts, count: int) -> peer.Tokens:
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
        tokens: peer.Tokens = out[:, ids.shape[1] :].tolist()
        return tokens

    def close(self) -> None:
        del self._model


def _load(setup: peer.Setup) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.directory, dtype=getattr(torch, setup.dtype)
    )
    return model.to(setup.device).eval()
