"""Whether the Hopper kernels take a model."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from photon_ext import hopper_runs
from photon_ext._library import hopper_takes_columns
from photon_ext.models.config import ModelConfig

HEAD_DIMS = (64, 96, 128, 256)  # those of split_attention.h and chunk_attention.h
MOST_SHARERS = 64  # query heads of a KV head


def linears_misfit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why not all linears of the model run their Hopper kernels there; None: they do. Only then are
    steps with chunks fused as decode steps are.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if not hopper_runs():
            return "the device does not run the Hopper kernels"
    if dtype is not torch.bfloat16:
        return f"the weights are {dtype}, not torch.bfloat16"
    if not hopper_takes_columns(config.hidden, normalizes=True):
        return f"hidden is {config.hidden}, not a multiple of 64 up to 16384"
    added = {"q_size": config.q_heads * config.head_dim, "intermediate": config.intermediate}
    for name, columns in added.items():  # inputs of O and down
        if not hopper_takes_columns(columns, normalizes=False):
            return f"{name} is {columns}, not a multiple of 64"
    return None


def hopper_misfit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why some kernel of the model's steps would be a portable one there; None: none would."""
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim is {config.head_dim}, none of {', '.join(map(str, HEAD_DIMS))}"
    if config.q_heads > MOST_SHARERS * config.kv_heads:
        sharers = f"{config.q_heads} query heads share {config.kv_heads} KV heads"
        return f"{sharers}, more than {MOST_SHARERS} each"
    return linears_misfit(config, dtype, device)
