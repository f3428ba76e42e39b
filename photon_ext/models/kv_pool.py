"""KvPool: the paged key and value memory of every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_ext.models.config import ModelConfig


@dataclass(frozen=True)
class KvPool:
    """Keys and values by layer, each [pages, page_size, kv_heads, head_dim].

    Who may use a page is the page table's business.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    nbytes: int


def allocate_kv_pool(
    config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KvPool:
    """Pages for all layers in one allocation.

    On CUDA the memory is zeroed: a kernel that loads whole tiles multiplies what lies past a row's
    length by zero, which must not be NaN. On a CPU it is not touched, so that the operating system
    commits only the pages that requests use.
    """
    shape = (config.layers, 2, num_pages, page_size, config.kv_heads, config.head_dim)
    allocate = torch.empty if device.type == "cpu" else torch.zeros
    memory = allocate(shape, dtype=dtype, device=device)
    return KvPool(
        tuple(layer[0] for layer in memory), tuple(layer[1] for layer in memory), memory.nbytes
    )
