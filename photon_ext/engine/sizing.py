"""How many KV pages an engine gets: enough for full rows, cut to the memory there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from photon_ext.engine.memory import available_bytes
from photon_ext.engine.options import EngineOptions
from photon_ext.errors import ConfigError
from photon_ext.models.config import ModelConfig

DEFAULT_MAX_LEN = 4096
CPU_ROWS, CUDA_ROWS = 32, 256
ROW_TOKENS = 1024  # that each of so many rows should have room for
CUDA_SHARE = 0.9  # of the available memory; the rest is for torch's workspaces and captured graphs
CPU_SHARE = 0.5  # of the available memory, which others use too


class EngineSize(NamedTuple):
    """What the options come to for one model: sequences at once, tokens per sequence, tokens per
    step, KV pages.
    """

    max_rows: int
    max_len: int
    max_step_tokens: int
    num_pages: int


class Need(NamedTuple):
    """What options ask for, in bytes and pages."""

    activations: int
    page: int  # bytes of one
    least: int
    most: int  # all rows are full

    def fitting(self, usable: int) -> int:
        """Pages that so many bytes hold beside the activations."""
        return max(0, usable - self.activations) // self.page

    def fits(self, usable: int) -> bool:
        return self.least <= self.fitting(usable)


def size_engine(
    options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> EngineSize:
    """Settles the sizes before anything is allocated. Raises ConfigError: max_len is beyond the
    model, or the memory does not hold what was asked for.
    """
    max_len, usable = _max_len(options, config), _usable_bytes(device)
    rows = options.max_rows or _default_rows(options, config, dtype, device, usable)
    if max_len > config.max_positions:
        raise ConfigError(
            f"max_len is {max_len} and the model was made for {config.max_positions} positions; "
            "ask for no more than that"
        )
    need = _need(options, rows, config, dtype)
    if not need.fits(usable):
        raise ConfigError(
            f"max_rows {rows}, max_len {max_len}, chunk {options.chunk} and page_size "
            f"{options.page_size} need {_gib(need.activations)} for activations and at least "
            f"{need.least} pages of {need.page / 2**10:.0f} KiB ({_gib(need.least * need.page)}) "
            f"for keys and values; {_gib(usable)} can be used on {device}: "
            f"{_remedy(options, rows, config, dtype, usable)}"
        )
    num_pages = options.num_pages or min(need.fitting(usable), need.most)
    return EngineSize(rows, max_len, max(options.chunk, rows), num_pages)


def _default_rows(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    usable: int,
) -> int:
    if device.type == "cpu":
        return CPU_ROWS
    pages = _need(options, CUDA_ROWS, config, dtype).fitting(usable)
    tokens = min(_max_len(options, config), ROW_TOKENS)
    return max(1, min(CUDA_ROWS, pages * options.page_size // tokens))


def _need(options: EngineOptions, rows: int, config: ModelConfig, dtype: torch.dtype) -> Need:
    step_tokens = max(options.chunk, rows)
    per_token = 3 * config.hidden + config.qkv_size + config.q_size + 3 * config.intermediate
    numbers = step_tokens * per_token + rows * (config.hidden + config.vocab)
    per_row = -(-_max_len(options, config) // options.page_size)
    return Need(
        dtype.itemsize * numbers,
        options.page_size * config.kv_bytes_per_token(dtype.itemsize),
        options.num_pages or max(rows, per_row),
        rows * per_row,
    )


def _remedy(
    options: EngineOptions, rows: int, config: ModelConfig, dtype: torch.dtype, usable: int
) -> str:
    """Names the options that can make it fit: each by itself, or else several together."""

    def fits_with(*lowered: str) -> bool:
        smaller: dict[str, Any] = dict.fromkeys(lowered, 1)
        fewer = smaller.get("max_rows", rows)
        return _need(replace(options, **smaller), fewer, config, dtype).fits(usable)

    pages = ["num_pages"] if options.num_pages else []
    sizes = ["max_rows", "max_len", *pages, "chunk", "page_size"]
    if alone := [name for name in sizes if fits_with(name)]:
        return f"lower {' or '.join(alone)}"
    if fits_with(*sizes):
        return f"lower more than one of {', '.join(sizes)}"
    return "not even one token fits; free memory there, or take a smaller model"


def _max_len(options: EngineOptions, config: ModelConfig) -> int:
    return options.max_len or min(config.max_positions, DEFAULT_MAX_LEN)


def _usable_bytes(device: torch.device) -> int:
    return int(available_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
