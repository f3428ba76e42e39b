"""The buffers of a forward, allocated once, so that steps allocate nothing and addresses stay.

`Activations` are what a forward writes, carved out of one arena; `KvPool` is the paged key and
value memory of every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from photon_ext.models.config import ModelConfig

_ALIGNMENT = 256  # bytes; what allocators and vectorized loads like


class Activations(NamedTuple):
    """Buffers of T tokens and R segments, all contiguous and in the dtype of the model.

    H hidden, D head_dim.
    """

    residual: torch.Tensor  # [T, H]
    normed: torch.Tensor  # [T, H]
    qkv: torch.Tensor  # [T, (q_heads + 2 kv_heads) * D]
    attention: torch.Tensor  # [T, q_heads * D]
    projected: (
        torch.Tensor
    )  # [T, H]: output of o and of down, added to the residual by the next norm
    gate_up: torch.Tensor  # [T, 2 * intermediate]
    act: torch.Tensor  # [T, intermediate]
    selected: torch.Tensor  # [R, H]: the tokens whose logits are wanted, in a prefill step
    logits: torch.Tensor  # [R, vocab]

    def leading(self, tokens: int, segments: int) -> Activations:
        """Views of so many tokens and segments; the memory is the same for every size."""
        counts = [tokens] * 7 + [segments] * 2
        return Activations(*(buffer[:count] for buffer, count in zip(self, counts, strict=True)))


class Arena(NamedTuple):
    """One allocation and the buffers inside it."""

    memory: torch.Tensor  # uint8
    activations: Activations


def allocate_activations(
    config: ModelConfig, tokens: int, segments: int, dtype: torch.dtype, device: torch.device
) -> Arena:
    """Zeroed buffers for steps of up to so many tokens and segments, in one allocation."""
    token_widths = (
        config.hidden,
        config.hidden,
        config.qkv_size,
        config.q_size,
        config.hidden,
        2 * config.intermediate,
        config.intermediate,
    )
    shapes = [(tokens, width) for width in token_widths] + [
        (segments, config.hidden),
        (segments, config.vocab),
    ]
    sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    buffers = []
    for shape, part in zip(shapes, torch.split(memory, sizes), strict=True):
        buffers.append(part.view(dtype)[: math.prod(shape)].view(shape))
    return Arena(memory, Activations(*buffers))


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
