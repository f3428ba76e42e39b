"""Which kernels a model's steps run on a GPU, by the number of tokens: what its plan asks for, and
what the launchers of the ops choose from that.

For whoever reads it: no step looks here. tests/emulator/test_kernel_table.py compares it with the
kernels that are launched. What also depends on addresses and strides is left to the ops: those of
the decoder's own buffers always fit. Steps with adapters have kernels of their own besides
(links between fused linears, of which one does SwiGLU; else shrink and expand); steps whose answers
are objects have theirs (spatial_features, choose_value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    ALL,
    LEAST_BATCH_TOKENS,
    KernelPlan,
    Target,
    Way,
    Ways,
    chunk_attention_misfit,
    decode_attention_misfit,
    even_attention_misfit,
    linear_misfit,
    linears_misfit,
)

NARROW_TOKENS = 8  # kTokens of stream_narrow.cuh
WIDE_TOKENS = 64  # kGroupTokens of stream_linear.cu
SPLIT_TOKENS, BATCHLESS_TOKENS = 96, 32  # below kManyTokens and kBatchTokens of warp_attention.cu
EVEN_TOKENS = 4096  # kMostItems of even_items.cuh
# what that takes: head_dim, query heads of a KV head at most, and pages of multiples of it
WARP_HEAD_DIM, WARP_SHARERS, WARP_PAGE = 128, 4, 16
_NO_WORKSPACE = "in groups of 64 tokens, for want of a workspace"


class Kernel(Enum):
    """Kernels by their names in csrc/cuda, less "_kernel"."""

    WITHIN = "-"  # what the op does is part of another kernel
    NARROW = "narrow"
    WIDE = "wide"
    TALL = "tall"
    TALL_NORM = "norm"
    BATCH = "batch"
    SUM_NORM = "sum_norm"  # behind o and down; in front of the first layer stands rms_norm
    TILE = "tile"
    TORCH = "cuBLAS"
    RMS_NORM = "rms_norm"
    SILU_MUL = "silu_mul"
    ROPE = "rope_append_kv"
    SPLIT = "split_attention"
    WARP = "warp_attention"
    BATCH_WARP = "batch_attention"
    CHUNK = "chunk_attention"
    EVEN = "even_attention"
    ATTENTION = "attention"
    SAMPLE = "sample"
    SAMPLE_CLUSTER = "sample (clusters)"


class Chosen(NamedTuple):
    """A kernel, and why it is not the Hopper one that was asked for; None: it is, or none was."""

    kernel: Kernel
    why: str | None = None


class Entry(NamedTuple):
    """What an op runs in steps of `least` to `most` tokens; None: of any number from `least` on.

    `step`: "decode", or "chunks", of chunks with or without decode rows beside them. There
    attention of decode rows goes by their number, and the head by that of segments.
    """

    step: str
    op: str
    least: int
    most: int | None
    kernel: Kernel
    why: str | None


@dataclass(frozen=True)
class Setting:
    """What the table follows from; `page_size` in tokens."""

    config: ModelConfig
    target: Target
    dtype: str
    plan: KernelPlan
    page_size: int = 16


def kernel_table(setting: Setting) -> list[Entry]:
    """Every op of a step that has a choice, in the order in which they run."""
    entries = []
    for step, ways in (("decode", setting.plan.decode), ("chunks", setting.plan.chunks)):
        bounds = {NARROW_TOKENS, WIDE_TOKENS, SPLIT_TOKENS, EVEN_TOKENS}
        bounds |= {ways.fused_tokens, ways.own_tokens}
        if setting.plan.batch_attention:
            bounds.add(BATCHLESS_TOKENS)
        if ways.batch_tokens:
            bounds |= {LEAST_BATCH_TOKENS - 1, ways.batch_tokens}
        starts = [1, *sorted(bound + 1 for bound in bounds if 0 < bound < ALL)]
        for op, choose in _ops(setting, step, ways).items():
            runs = groupby(starts, choose)
            firsts = [(next(tokens), chosen) for chosen, tokens in runs]
            ends = [least - 1 for least, _ in firsts[1:]]
            for (least, chosen), most in zip(firsts, [*ends, None], strict=True):
                entries.append(Entry(step, op, least, most, *chosen))
    return entries


def _ops(one: Setting, step: str, ways: Ways) -> dict[str, Callable[[int], Chosen]]:
    """Of each op, what it runs for a number of tokens."""

    def linear(columns: str, normalizes: bool) -> Callable[[int], Chosen]:
        return lambda tokens: _linear(one, ways.of(tokens), tokens, columns, normalizes)

    attention: dict[str, Callable[[int], Chosen]] = {
        "attention": lambda tokens: _decode_attention(one, tokens)
    }
    if step == "chunks":
        attention = {
            "attention of chunks": lambda tokens: _chunk_attention(one, tokens),
            "attention of decode rows": attention["attention"],
        }
    inside = one.plan.hopper and step == "decode"
    return {
        "norms": lambda tokens: _norms(one, ways.of(tokens), tokens),
        "q, k, v": linear("hidden", True),
        "rotation": lambda _: Chosen(Kernel.WITHIN if inside else Kernel.ROPE),
        **attention,
        "o": linear("q_size", False),
        "gate, up": linear("hidden", True),
        "swiglu": lambda tokens: Chosen(
            Kernel.WITHIN if ways.of(tokens) in (Way.FUSED, Way.BATCH) else Kernel.SILU_MUL
        ),
        "down": linear("intermediate", False),
        "head": lambda tokens: _linear(one, ways.besides_batch(tokens), tokens, "hidden", True),
        "sampling": lambda _: _sampling(one),
    }


def _linear(one: Setting, way: Way, tokens: int, columns: str, normalizes: bool) -> Chosen:
    if way is Way.TORCH:
        return Chosen(Kernel.TORCH)
    if way is Way.OWN:
        fused = one.plan.hopper  # was asked for
        why = linears_misfit(one.config, one.target, one.dtype) if fused else None
        return Chosen(Kernel.TILE, why)
    misfit = linear_misfit(one.config, one.target, one.dtype, columns, normalizes)
    if misfit is not None:
        return Chosen(Kernel.TILE, misfit)
    if way is Way.BATCH:
        return Chosen(Kernel.BATCH)
    if tokens <= NARROW_TOKENS:
        return Chosen(Kernel.NARROW)
    if tokens > WIDE_TOKENS and normalizes and not _has_workspace(one):
        return Chosen(Kernel.WIDE, _NO_WORKSPACE)
    return Chosen(Kernel.WIDE if tokens <= WIDE_TOKENS else Kernel.TALL)


def _has_workspace(one: Setting) -> bool:
    """As Decoder: `2 * intermediate` elements of bfloat16 hold the words of a token that
    ops.linear_workspace_words counts.
    """
    words = (one.config.hidden + 1) // 2 + 1
    return one.plan.chunks.fused_tokens > 0 and one.config.intermediate >= words


def _norms(one: Setting, way: Way, tokens: int) -> Chosen:
    if way is not Way.FUSED:
        return Chosen(Kernel.SUM_NORM if way is Way.BATCH else Kernel.RMS_NORM)
    tall = _linear(one, way, tokens, "hidden", True).kernel is Kernel.TALL
    return Chosen(Kernel.TALL_NORM if tall else Kernel.WITHIN)


def _decode_attention(one: Setting, tokens: int) -> Chosen:
    config = one.config
    if not one.plan.hopper:
        return Chosen(Kernel.ATTENTION)
    misfit = decode_attention_misfit(config, one.target, one.dtype)
    if misfit is not None:
        return Chosen(Kernel.ATTENTION, misfit)
    few, by_warps = SPLIT_TOKENS, Kernel.WARP
    if one.plan.batch_attention:
        few, by_warps = BATCHLESS_TOKENS, Kernel.BATCH_WARP
    fits = (
        tokens > few
        and config.head_dim == WARP_HEAD_DIM
        and config.q_heads <= WARP_SHARERS * config.kv_heads
        and one.page_size % WARP_PAGE == 0
    )
    return Chosen(by_warps if fits else Kernel.SPLIT)


def _chunk_attention(one: Setting, tokens: int) -> Chosen:
    if not one.plan.hopper:
        return Chosen(Kernel.ATTENTION)
    misfit = chunk_attention_misfit(one.config, one.target, one.dtype)
    if misfit is not None:
        return Chosen(Kernel.ATTENTION, misfit)
    if not one.plan.even:
        return Chosen(Kernel.CHUNK)
    misfit = even_attention_misfit(one.config, one.target, one.dtype, one.page_size)
    if misfit is None and tokens > EVEN_TOKENS:
        misfit = f"a step of more than {EVEN_TOKENS} tokens"
    return Chosen(Kernel.EVEN if misfit is None else Kernel.CHUNK, misfit)


def _sampling(one: Setting) -> Chosen:
    if not one.plan.hopper:
        return Chosen(Kernel.SAMPLE)
    if one.target.runs_hopper:
        return Chosen(Kernel.SAMPLE_CLUSTER)
    return Chosen(Kernel.SAMPLE, "the device does not run the Hopper kernels")
