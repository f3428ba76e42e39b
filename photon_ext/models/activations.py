"""Activations: every buffer that a forward writes, carved once out of one arena: steps allocate
nothing and addresses stay.
"""

from __future__ import annotations

import math
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
    # [T, H]: output of o and of down, added to the residual by the next norm
    projected: torch.Tensor
    gate_up: torch.Tensor  # [T, 2 * intermediate]
    act: torch.Tensor  # [T, intermediate]
    selected: torch.Tensor  # [R, H]: the tokens whose logits are wanted, in a prefill step
    logits: torch.Tensor  # [R, vocab]

    def leading(self, num_tokens: int, segments: int) -> Activations:
        """Views of the first `tokens` and `segments` rows; the memory is the same for every
        size.
        """
        counts = [num_tokens] * 7 + [segments] * 2
        return Activations(*(buffer[:count] for buffer, count in zip(self, counts, strict=True)))


class Arena(NamedTuple):
    """One allocation and the buffers inside it."""

    memory: torch.Tensor  # uint8
    activations: Activations


def allocate_activations(
    config: ModelConfig, num_tokens: int, segments: int, dtype: torch.dtype, device: torch.device
) -> Arena:
    """Zeroed buffers for steps of up to `tokens` tokens and `segments` segments, in one
    allocation on `device`.
    """
    line_widths = (
        config.hidden,
        config.hidden,
        config.qkv_size,
        config.q_size,
        config.hidden,
        2 * config.intermediate,
        config.intermediate,
    )
    shapes = [(num_tokens, width) for width in line_widths] + [
        (segments, config.hidden),
        (segments, config.vocab),
    ]
    sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    buffers = []
    for shape, part in zip(shapes, torch.split(memory, sizes), strict=True):
        buffers.append(part.view(dtype)[: math.prod(shape)].view(shape))
    return Arena(memory, Activations(*buffers))
