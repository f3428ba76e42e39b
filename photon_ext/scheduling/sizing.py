"""How many KV pages an engine gets: enough for every row at full length, cut to the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_ext.errors import ConfigError
from photon_ext.models.config import ModelConfig
from photon_ext.scheduling.memory import available_bytes
from photon_ext.scheduling.options import EngineOptions

DEFAULT_MAX_LEN = 4096
CUDA_SHARE = 0.9  # of the available memory; the rest is for torch's workspaces and captured graphs
CPU_SHARE = 0.5  # of the available memory, which others use too


@dataclass(frozen=True)
class EngineSize:
    """What the options come to for one model: tokens per sequence, tokens per step, and the page pool (page 0 not counted)."""

    max_len: int
    max_lines: int
    num_pages: int


def size_engine(options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> EngineSize:
    """Settles the sizes before anything is allocated.

    Raises:
        ConfigError: max_len is beyond the model, or the memory does not hold what was asked for.
    """
    max_len = min(config.max_positions, DEFAULT_MAX_LEN) if options.max_len is None else options.max_len
    if max_len > config.max_positions:
        raise ConfigError(f"max_len is {max_len} and the model was made for {config.max_positions} positions; ask for no more than that")
    rows = options.max_rows
    max_lines = max(options.chunk, rows)
    fixed = _activation_bytes(config, max_lines, rows, dtype)
    page_bytes = options.page_size * config.kv_bytes_per_token(dtype.itemsize)
    usable = _usable_bytes(device)
    fitting = max(0, usable - fixed) // page_bytes - 1  # page 0 takes room as well
    pages_per_row = -(-max_len // options.page_size)
    least = max(rows, pages_per_row) if options.num_pages is None else options.num_pages
    if least > fitting:
        raise ConfigError(
            f"max_rows {rows} and max_len {max_len} need {_gib(fixed)} for activations and at least {least} pages of "
            f"{page_bytes / 2**10:.0f} KiB ({_gib(least * page_bytes)}) for keys and values; {_gib(usable)} can be used on {device}: "
            "lower max_rows, max_len or num_pages"
        )
    return EngineSize(max_len, max_lines, options.num_pages or min(fitting, rows * pages_per_row))


def _activation_bytes(config: ModelConfig, lines: int, rows: int, dtype: torch.dtype) -> int:
    per_line = 3 * config.hidden + config.qkv_size + config.q_size + 3 * config.intermediate
    return dtype.itemsize * (lines * per_line + rows * (config.hidden + config.vocab))


def _usable_bytes(device: torch.device) -> int:
    return int(available_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
