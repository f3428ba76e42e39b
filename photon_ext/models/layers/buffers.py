"""The buffers of a forward, allocated once, so that steps allocate nothing and addresses stay.

`Activations` are what a forward writes, carved out of one arena; `Workspaces` are what linears add
up in; `KvPool` is the paged key and value memory of every layer. How many bytes each takes is said
here once, for whoever allocates it and for whoever plans for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from photon_ext import ops
from photon_ext.checks import KvDtype
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    KernelPlan,
    has_spare_workspace,
    linear_workspace_words,
)
from photon_ext.models.projections import head_projection, layer_projections
from photon_ext.weight_format import SCALE_BLOCK

_ALIGNMENT = 256  # bytes; what allocators and vectorized loads like
_SCALE_BYTES = 4  # of keys and values in fp8: one for each token and head
_MOST_NUMBERS = 1 << 26  # words of 4 bytes: what a workspace of numbers takes at most


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
        """Views for a step of these tokens and segments; the memory is the same for every size."""
        counts = [tokens] * 7 + [segments] * 2
        return Activations(*(buffer[:count] for buffer, count in zip(self, counts, strict=True)))


class Arena(NamedTuple):
    """One allocation and the buffers inside it."""

    memory: torch.Tensor  # uint8
    activations: Activations


def activation_bytes(config: ModelConfig, tokens: int, segments: int, dtype: torch.dtype) -> int:
    """Memory of the activations of steps of up to `tokens` and `segments`."""
    return sum(_sizes(_shapes(config, tokens, segments), dtype))


def allocate_activations(
    config: ModelConfig, tokens: int, segments: int, dtype: torch.dtype, device: torch.device
) -> Arena:
    """Zeroed buffers for steps of up to `tokens` and `segments`, in one allocation."""
    shapes = _shapes(config, tokens, segments)
    sizes = _sizes(shapes, dtype)
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    parts = zip(shapes.items(), torch.split(memory, sizes), strict=True)
    return Arena(
        memory,
        Activations(
            **{
                name: part.view(dtype)[: math.prod(shape)].view(shape)
                for (name, shape), part in parts
            }
        ),
    )


def _shapes(config: ModelConfig, tokens: int, segments: int) -> dict[str, tuple[int, int]]:
    """By the names of Activations, in their order."""
    linears = layer_projections(config)
    token_widths = {
        "residual": config.hidden,
        "normed": config.hidden,
        "qkv": linears["qkv"].n,
        "attention": linears["o"].k,
        "projected": config.hidden,
        "gate_up": linears["gate_up"].n,
        "act": linears["down"].k,
    }
    shapes = {name: (tokens, width) for name, width in token_widths.items()}
    return shapes | {"selected": (segments, config.hidden), "logits": (segments, config.vocab)}


def _sizes(shapes: dict[str, tuple[int, int]], dtype: torch.dtype) -> list[int]:
    """Bytes of each, in whole alignments."""
    sizes = (math.prod(shape) * dtype.itemsize for shape in shapes.values())
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


class Workspaces(NamedTuple):
    """Where linears keep float32 sums, and numbers; None: they need none, or do with less."""

    linear: torch.Tensor | None  # of those that normalize many tokens, or are of few bits
    batch: torch.Tensor | None  # of those of a batch
    numbers: torch.Tensor | None  # of a weight of few bits, or some of its rows, that torch
    # multiplies by; in the dtype of the model
    normed: torch.Tensor | None  # bytes for the normalized residual in fp8, and its scales,
    read: torch.Tensor | None  # and for what a linear reads besides

    def normed_tokens(self, tokens: int, k: int) -> Fp8Tokens:
        """[tokens, k] of `normed`, in a plan with fp8_activations."""
        return _leading_tokens(self.normed, tokens, k)

    def read_tokens(self, tokens: int, k: int) -> Fp8Tokens:
        """[tokens, k] of `read`."""
        return _leading_tokens(self.read, tokens, k)


def _leading_tokens(room: torch.Tensor | None, tokens: int, k: int) -> Fp8Tokens:
    """As _fp8_words counts them."""
    assert room is not None, "a plan with fp8_activations has room for tokens in fp8"
    begin = 4 * _aligned_words(tokens * k)
    scale = room[begin : begin + 4 * tokens].view(torch.float32)
    return Fp8Tokens(room[: tokens * k].view(tokens, k), scale)


class WorkspaceWords(NamedTuple):
    """float32 numbers of the workspaces that have memory of their own."""

    linear: int
    batch: int
    numbers: int
    normed: int
    read: int


def workspace_words(
    config: ModelConfig, plan: KernelPlan, tokens: int, segments: int, lora: bool
) -> WorkspaceWords:
    """Of the plan's linears, in steps of up to `tokens` and `segments`; `lora`: some have
    adapters.

    Fused layers do not use the buffer of gate and up, which is the workspace of their linears then;
    with adapters they use it, too.
    """
    linear = batch = 0
    if plan.chunks.fused_tokens and lora:
        linear = linear_workspace_words(config, plan, max(tokens, segments))
    most = max(plan.decode.batch_tokens, plan.chunks.batch_tokens)
    if most:
        batch = ops.linear_norm_workspace_words(min(most, tokens), config.hidden)
    normed = read = 0
    if plan.fp8_activations:
        widest = max(config.hidden, *(shape.k for shape in layer_projections(config).values()))
        normed = _fp8_words(min(most, tokens), config.hidden)
        read = _fp8_words(max(tokens, segments), widest)
    return WorkspaceWords(linear, batch, _numbers_words(config, plan), normed, read)


def _fp8_words(tokens: int, k: int) -> int:
    """Of tokens in fp8, and of their scales behind them."""
    return _aligned_words(tokens * k) + _aligned_words(4 * tokens)


def _aligned_words(count: int) -> int:
    """Of so many bytes, in whole alignments."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT // 4


def _numbers_words(config: ModelConfig, plan: KernelPlan) -> int:
    """Room for the largest weight that torch cannot read, of 16-bit numbers, up to a bound; and for
    rows that may share scales, also of float32.
    """
    if not (plan.decode.uses_torch or plan.chunks.uses_torch):
        return 0
    shapes = [*layer_projections(config).values(), head_projection(config)]
    sizes = (
        max(min(shape.n * shape.k // 2, _MOST_NUMBERS), min(shape.n, SCALE_BLOCK) * shape.k)
        for shape in shapes
        if not shape.is_dense
    )
    return max(sizes, default=0)


def allocate_workspaces(
    config: ModelConfig, words: WorkspaceWords, plan: KernelPlan, arena: Arena
) -> Workspaces:
    """Those of their own, zeroed, and what the arena has to spare."""

    def zeros(count: int) -> torch.Tensor | None:
        device = arena.memory.device
        return torch.zeros(count, dtype=torch.float32, device=device) if count else None

    linear, spare = zeros(words.linear), arena.activations.gate_up
    if linear is None and plan.chunks.fused_tokens:
        sizes = len(spare), len(arena.activations.logits), spare.itemsize
        if has_spare_workspace(config, plan, *sizes):  # else the linears go in groups of tokens
            linear = spare.view(-1).view(torch.float32)
    numbers = zeros(words.numbers)
    if numbers is not None:
        numbers = numbers.view(arena.activations.residual.dtype)
    normed, read = map(_fp8_room, map(zeros, (words.normed, words.read)))
    return Workspaces(linear, zeros(words.batch), numbers, normed, read)


def _fp8_room(memory: torch.Tensor | None) -> torch.Tensor | None:
    return None if memory is None else memory.view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class KvPool:
    """Keys and values by layer, each [pages, page_size, kv_heads, head_dim], and their scales,
    float32 [pages, 2, kv_heads, page_size], where they are in fp8.

    Who may use a page is the page table's business.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor | None, ...]
    nbytes: int


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype, kv_dtype: KvDtype | None) -> int:
    """Memory of keys and values of a token over all layers; `dtype`: of the model."""
    if kv_dtype is None:
        return config.kv_bytes_per_token(dtype.itemsize)
    scales = 2 * config.layers * config.kv_heads
    return config.kv_bytes_per_token(torch.float8_e4m3fn.itemsize) + _SCALE_BYTES * scales


def allocate_kv_pool(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype | None = None,
) -> KvPool:
    """Pages for all layers in one allocation, and their scales in another; `dtype`: of the model.

    On CUDA the memory is zeroed: a kernel that loads whole tiles multiplies what lies past a row's
    length by zero, which must not be NaN. On a CPU it is not touched, so that the operating system
    commits only the pages that requests use.
    """
    shape = (config.layers, 2, num_pages, page_size, config.kv_heads, config.head_dim)
    allocate = torch.empty if device.type == "cpu" else torch.zeros
    stored = dtype if kv_dtype is None else torch.float8_e4m3fn
    memory = allocate(shape, dtype=stored, device=device)
    keys, values = tuple(layer[0] for layer in memory), tuple(layer[1] for layer in memory)
    if kv_dtype is None:
        return KvPool(keys, values, (None,) * config.layers, memory.nbytes)
    of_scales = (config.layers, num_pages, 2, config.kv_heads, page_size)
    scales = allocate(of_scales, dtype=torch.float32, device=device)
    return KvPool(keys, values, tuple(scales), memory.nbytes + scales.nbytes)
