"""How many KV pages an engine gets: enough for full rows, cut to the memory there is."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from photon_ext.engine.memory import available_bytes
from photon_ext.engine.options import EngineOptions
from photon_ext.errors import ConfigError
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import KernelPlan
from photon_ext.models.layers.attention import attention_words
from photon_ext.models.layers.buffers import (
    activation_bytes,
    kv_bytes_per_token,
    workspace_words,
)
from photon_ext.models.lora import LoraShape
from photon_ext.models.region import RegionConfig
from photon_ext.models.rope import table_bytes
from photon_ext.runtime.step_keys import step_keys

DEFAULT_MAX_LEN = 4096
CPU_ROWS, CUDA_ROWS = 32, 256
CPU_CHUNK, CUDA_CHUNK = 256, 2048
CPU_AUTOMATA_MIB, CUDA_AUTOMATA_MIB = 16, 64
LEAST_BUCKET = 64
ROW_TOKENS = 1024  # each row should have room for that many
CUDA_SHARE = 0.9  # of the available memory; the rest is for torch's workspaces and captured graphs
CPU_SHARE = 0.5  # of the available memory, which others use too


class EngineSize(NamedTuple):
    """What the options come to for one model: sequences at once, tokens per sequence, prompt tokens
    per step and those of captured steps (None: the runtime's own), all tokens and segments per
    step, KV pages, words for automata.
    """

    max_rows: int
    max_len: int
    chunk: int
    prefill_buckets: tuple[int, ...] | None
    max_step_tokens: int
    max_segments: int
    num_pages: int
    automaton_words: int


class Need(NamedTuple):
    """What options ask for, in bytes and pages."""

    activations: int
    page: int  # bytes of one
    least: int
    most: int  # all rows are full

    def fitting(self, usable: int) -> int:
        """Pages that `usable` bytes hold beside the activations."""
        return max(0, usable - self.activations) // self.page

    def fits(self, usable: int) -> bool:
        return self.least <= self.fitting(usable)


def size_engine(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    plan: KernelPlan,
    region: RegionConfig | None = None,
) -> EngineSize:
    """Settles the sizes before anything is allocated; `region`: of the region heads. Raises
    ConfigError: max_len is beyond the model, or the memory does not hold what was asked for.
    """
    max_len, usable = _max_len(options, config), _usable_bytes(device)
    config.check_max_len(max_len)
    target = SizedModel(config, dtype, device, plan, region)
    options = target.with_chunk(options, usable)
    rows = options.max_rows or target.default_rows(options, usable)
    need = target.need(options, rows)
    if not need.fits(usable):
        raise ConfigError(
            f"max_rows {rows}, max_len {max_len}, chunk {target.chunk(options)} and page_size "
            f"{options.page_size} need {_gib(need.activations)} for activations and at least "
            f"{need.least} pages of {need.page / 2**10:.0f} KiB ({_gib(need.least * need.page)}) "
            f"for keys and values; {_gib(usable)} can be used on {device}: "
            f"{_remedy(options, rows, target, usable)}"
        )
    num_pages = options.num_pages or min(need.fitting(usable), need.most)
    step = target.step_size(options, rows)
    chunk, buckets = target.chunk(options), target.prefill_buckets(options)
    words = target.automata_bytes(options) // 4
    return EngineSize(rows, max_len, chunk, buckets, *step, num_pages, words)


class SizedModel(NamedTuple):
    """What an engine is sized for."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    plan: KernelPlan
    region: RegionConfig | None

    def default_rows(self, options: EngineOptions, usable: int) -> int:
        """Rows where the options name none: on a GPU as many as have room beside what they take."""
        if self.device.type == "cpu":
            return CPU_ROWS
        tokens = min(_max_len(options, self.config), ROW_TOKENS)

        def room_beside(rows: int) -> int:
            return self.need(options, rows).fitting(usable) * options.page_size // tokens

        rows = range(2, CUDA_ROWS + 1)  # from some number of them on there is not enough room
        return 1 + bisect_left(rows, True, key=lambda count: room_beside(count) < count)

    def with_chunk(self, options: EngineOptions, usable: int) -> EngineOptions:
        """Where they name no chunk on a GPU: the largest that fits of CUDA_CHUNK and its halves."""
        if options.chunk is not None or self.device.type == "cpu":
            return options
        chunk = CUDA_CHUNK
        while chunk >= LEAST_BUCKET:
            chosen = replace(options, chunk=chunk)
            rows = options.max_rows or self.default_rows(chosen, usable)
            if self.need(chosen, rows).fits(usable):
                return chosen
            chunk //= 2
        return options

    def chunk(self, options: EngineOptions) -> int:
        """Prompt tokens of a step."""
        return options.chunk or (CUDA_CHUNK if self.device.type == "cuda" else CPU_CHUNK)

    def prefill_buckets(self, options: EngineOptions) -> tuple[int, ...] | None:
        """Prompt tokens of captured steps; None leaves it to the runtime."""
        if options.prefill_buckets is not None or self.device.type == "cpu":
            return options.prefill_buckets
        doublings = (self.chunk(options) // LEAST_BUCKET).bit_length()
        return tuple(LEAST_BUCKET << doubling for doubling in range(doublings))

    def automata_bytes(self, options: EngineOptions) -> int:
        """Memory for automata."""
        default = CUDA_AUTOMATA_MIB if self.device.type == "cuda" else CPU_AUTOMATA_MIB
        return 2**20 * (default if options.automata_mib is None else options.automata_mib)

    def step_size(self, options: EngineOptions, rows: int) -> tuple[int, int]:
        """Tokens and segments of the largest step that the engine plans."""
        keys = step_keys(
            rows,
            chunk := self.chunk(options),
            options.buckets,
            self.prefill_buckets(options),
            options.prefill != "separate",
            graph=options.graph,
            captures_prefill=self.device.type == "cpu",
        )
        if keys.mixed or options.prefill == "mixed":
            return rows + chunk, keys.max_segments
        return max(rows, chunk), keys.max_segments

    def need(self, options: EngineOptions, rows: int) -> Need:
        """What `rows` rows need."""
        config = self.config
        per_row = -(-_max_len(options, config) // options.page_size)
        counts = 4 * rows * config.vocab if options.penalties else 0
        return Need(
            self._decoder_bytes(options, rows) + counts + self.automata_bytes(options),
            options.page_size * kv_bytes_per_token(config, self.dtype, options.kv_dtype),
            options.num_pages or max(rows, per_row),
            rows * per_row,
        )

    def _decoder_bytes(self, options: EngineOptions, rows: int) -> int:
        """What a Decoder holds besides weights and pages: its buffers say so themselves."""
        config, dtype, plan = self.config, self.dtype, self.plan
        tokens, segments = self.step_size(options, rows)
        places, lora = options.embeds_tokens * config.hidden, options.lora_slots > 0
        words = workspace_words(config, plan, tokens, segments, lora)
        fp8_kv = options.kv_dtype is not None
        of_attention = attention_words(
            config, plan, tokens, segments, options.page_size, dtype, self.device, fp8_kv
        )
        total = activation_bytes(config, tokens, segments, dtype) + dtype.itemsize * places
        total += 4 * (sum(words) + sum(of_attention))
        total += table_bytes(config, _max_len(options, config))
        if lora:
            shape = LoraShape(config, options.lora_rank)
            total += shape.nbytes(options.lora_slots, tokens, dtype)
        if self.region is not None:
            total += self.region.step_bytes(tokens, segments, dtype.itemsize)
        return total


def _remedy(options: EngineOptions, rows: int, target: SizedModel, usable: int) -> str:
    """Names the options that can make it fit: each by itself, or else several together."""

    def fits_with(*lowered: str) -> bool:
        smaller: dict[str, Any] = dict.fromkeys(lowered, 1)
        fewer = smaller.get("max_rows", rows)
        return target.need(replace(options, **smaller), fewer).fits(usable)

    pages = ["num_pages"] if options.num_pages else []
    slots = ["lora_slots"] if options.lora_slots else []
    places = ["embeds_tokens"] if options.embeds_tokens else []
    automata = ["automata_mib"] if target.automata_bytes(options) > 2**20 else []
    sizes = ["max_rows", "max_len", *pages, *slots, *places, "chunk", "page_size", *automata]
    if alone := [name for name in sizes if fits_with(name)]:
        return f"lower {' or '.join(alone)}"
    if fits_with(*sizes):
        return f"lower more than one of {', '.join(sizes)}"
    return "not even one token fits; free memory there, or take a smaller model"


def _max_len(options: EngineOptions, config: ModelConfig) -> int:
    return options.max_len or min(config.longest, DEFAULT_MAX_LEN)


def _usable_bytes(device: torch.device) -> int:
    return int(available_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
