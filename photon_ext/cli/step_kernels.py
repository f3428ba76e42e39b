"""Which kernels a model's steps run on a GPU, by the number of tokens: what its plan asks for, and
what the ops choose from that (csrc/common/linear_plan.h, attention_plan.h).

No step looks here. tests/emulator/test_step_kernels.py compares it with the kernels that are
launched. Buffers are those of the decoder, which always fit. Steps with adapters have kernels of
their own besides (links between fused linears, one with SwiGLU; else shrink and expand);
steps whose answers are objects have theirs (spatial_features, choose_value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from photon_ext import _C
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    ALL,
    LEAST_BATCH_TOKENS,
    ExecutionMode,
    ExecutionModes,
    KernelPlan,
    Linear,
    Target,
    layer_linears,
    linears_unsupported,
)

WITHIN = "-"  # what the op does is part of another kernel
TORCH = "cuBLAS"


class Chosen(NamedTuple):
    """A kernel by its name in csrc/cuda, less "_kernel", and why it is not the Hopper one that was
    asked for; None: it is, or none was.
    """

    kernel: str
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
    kernel: str
    why: str | None


@dataclass(frozen=True)
class Setting:
    """What the table follows from; `page_size` in tokens."""

    config: ModelConfig
    target: Target
    dtype: str
    plan: KernelPlan
    page_size: int = 16


def step_kernels(setting: Setting) -> list[Entry]:
    """Every op of a step that has a choice, in the order in which they run."""
    entries = []
    for step, modes in (("decode", setting.plan.decode), ("chunks", setting.plan.chunks)):
        bounds = {*_C.plan_tokens, modes.fused_tokens, modes.own_tokens}
        if modes.batch_tokens:
            bounds |= {LEAST_BATCH_TOKENS - 1, modes.batch_tokens}
        starts = [1, *sorted(bound + 1 for bound in bounds if 0 < bound < ALL)]
        for op, choose in _ops(setting, step, modes).items():
            runs = groupby(starts, choose)
            firsts = [(next(tokens), chosen) for chosen, tokens in runs]
            ends = [least - 1 for least, _ in firsts[1:]]
            for (least, chosen), most in zip(firsts, [*ends, None], strict=True):
                entries.append(Entry(step, op, least, most, *chosen))
    return entries


def _ops(one: Setting, step: str, modes: ExecutionModes) -> dict[str, Callable[[int], Chosen]]:
    """Of each op, what it runs for a number of tokens."""
    linears = layer_linears(one.config)

    def linear(name: str) -> Callable[[int], Chosen]:
        return lambda tokens: _linear(one, modes.of(tokens), tokens, linears[name])

    attention: dict[str, Callable[[int], Chosen]] = {
        "attention": lambda tokens: _decode_attention(one, tokens)
    }
    if step == "chunks":
        attention = {
            "attention of chunks": lambda tokens: _chunk_attention(one, tokens),
            "attention of decode rows": attention["attention"],
        }
    inside = one.plan.hopper and step == "decode"
    head = linears["q, k, v"]._replace(n=one.config.vocab)
    return {
        "norms": lambda tokens: _norms(one, modes.of(tokens), tokens),
        "q, k, v": linear("q, k, v"),
        "rotation": lambda _: Chosen(WITHIN if inside else "rope_append_kv"),
        **attention,
        "o": linear("o"),
        "gate, up": linear("gate, up"),
        "swiglu": lambda tokens: Chosen(
            WITHIN if modes.of(tokens) in (ExecutionMode.FUSED, ExecutionMode.BATCH) else "silu_mul"
        ),
        "down": linear("down"),
        "head": lambda tokens: _linear(one, modes.head(tokens, modes.of(tokens)), tokens, head),
        "sampling": lambda _: _sampling(one),
    }


def _linear(one: Setting, mode: ExecutionMode, tokens: int, linear: Linear) -> Chosen:
    if mode is ExecutionMode.TORCH:
        return Chosen(TORCH)
    if mode is ExecutionMode.OWN:
        fused = one.plan.hopper  # was asked for
        return Chosen(
            "tile", linears_unsupported(one.config, one.target, one.dtype) if fused else None
        )
    op = linear.batch if mode is ExecutionMode.BATCH else linear.fused
    workspace = mode is ExecutionMode.BATCH or _has_workspace(one)
    return Chosen(
        *_C.plan_linear(one.target.gpu, op, one.dtype, tokens, linear.n, linear.k, workspace)
    )


def _has_workspace(one: Setting) -> bool:
    """As Decoder: `2 * intermediate` elements of bfloat16 hold a token's words."""
    words = _C.linear_workspace_words(1, one.config.hidden)
    return one.plan.chunks.fused_tokens > 0 and one.config.intermediate >= words


def _norms(one: Setting, mode: ExecutionMode, tokens: int) -> Chosen:
    if mode is ExecutionMode.BATCH:
        return Chosen("sum_norm")  # behind o and down; in front of the first layer stands rms_norm
    if mode is not ExecutionMode.FUSED:
        return Chosen("rms_norm")
    linear = _linear(one, mode, tokens, layer_linears(one.config)["q, k, v"])
    return Chosen("norm" if linear.kernel == "large" else WITHIN)


def _decode_attention(one: Setting, tokens: int) -> Chosen:
    if not one.plan.hopper:
        return Chosen("attention")
    c, batch = one.config, one.plan.batch_attention
    heads = c.q_heads, c.kv_heads, c.head_dim
    gpu = one.target.gpu
    return Chosen(*_C.plan_decode_attention(gpu, one.dtype, tokens, *heads, one.page_size, batch))


def _chunk_attention(one: Setting, tokens: int) -> Chosen:
    if not one.plan.hopper:
        return Chosen("attention")
    c, even = one.config, one.plan.even
    heads = c.q_heads, c.kv_heads, c.head_dim
    gpu = one.target.gpu
    return Chosen(*_C.plan_paged_attention(gpu, one.dtype, tokens, *heads, one.page_size, even))


def _sampling(one: Setting) -> Chosen:
    if not one.plan.hopper:
        return Chosen("sample")
    why = _C.hopper_unsupported(one.target.gpu)
    return Chosen("sample (clusters)") if why is None else Chosen("sample", why)
