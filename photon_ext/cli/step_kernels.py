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
from typing import Any, NamedTuple

from photon_ext import _C
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    ALL,
    ExecutionMode,
    ExecutionModes,
    KernelPlan,
    Target,
    has_spare_workspace,
    linears_unsupported,
    plan_projection,
    takes_fp8_product,
)
from photon_ext.models.projections import (
    TITLES,
    ProjectionShape,
    head_projection,
    layer_projections,
)

WITHIN = "-"  # what the op does is part of another kernel
TORCH, TORCH_FP8 = "cuBLAS", "torch fp8"


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
    """What the table follows from; `page_size` in tokens; `fp8_kv`: keys and values are in fp8;
    `most_tokens` of a step: what a GPU's chunk of prompts is, unless an engine is told otherwise.
    """

    config: ModelConfig
    target: Target
    dtype: str
    plan: KernelPlan
    page_size: int = 16
    fp8_kv: bool = False
    most_tokens: int = 2048


def step_kernels(setting: Setting) -> list[Entry]:
    """Every op of a step that has a choice, in the order in which they run."""
    entries = []
    for step, modes in (("decode", setting.plan.decode), ("chunks", setting.plan.chunks)):
        bounds = {*_C.plan_tokens, modes.fused_tokens, modes.own_tokens}
        if modes.batch_tokens:
            bounds |= {modes.least_batch_tokens - 1, modes.batch_tokens}
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
    shapes = layer_projections(one.config)

    def linear(name: str) -> dict[str, Callable[[int], Chosen]]:
        shape = shapes[name]
        return {TITLES[name]: lambda tokens: _linear(one, modes.of(tokens), tokens, shape)}

    def decodes(tokens: int) -> Chosen:
        return _attention(one, _C.plan_decode_attention, tokens, one.plan.batch_attention)

    attention: dict[str, Callable[[int], Chosen]] = {"attention": decodes}
    if step == "chunks":
        attention = {
            "attention of chunks": lambda tokens: _attention(
                one, _C.plan_paged_attention, tokens, one.plan.balanced_attention
            ),
            "attention of decode rows": decodes,
        }
    inside = one.plan.hopper and step == "decode"
    head = head_projection(one.config)
    return {
        "norms": lambda tokens: _norms(one, modes.of(tokens), tokens),
        **linear("qkv"),
        "rotation": lambda _: Chosen(WITHIN if inside else "rope_append_kv"),
        **attention,
        **linear("o"),
        **linear("gate_up"),
        "swiglu": lambda tokens: Chosen(
            WITHIN if modes.of(tokens) in (ExecutionMode.FUSED, ExecutionMode.BATCH) else "silu_mul"
        ),
        **linear("down"),
        "head": lambda tokens: _linear(
            one, modes.head(tokens, modes.of(tokens), head.is_dense), tokens, head
        ),
        "sampling": lambda _: _sampling(one),
    }


def _linear(one: Setting, mode: ExecutionMode, tokens: int, shape: ProjectionShape) -> Chosen:
    if mode is ExecutionMode.TORCH:
        (stored, *more) = dict.fromkeys(shape.stored or (None,))
        is_fp8 = one.plan.fp8_activations and not more and stored and stored.has_row_scales
        return Chosen(TORCH_FP8 if is_fp8 and takes_fp8_product(shape.n, shape.k) else TORCH)
    if mode is ExecutionMode.OWN:
        fused = one.plan.hopper  # was asked for
        return Chosen(
            "tile", linears_unsupported(one.config, one.target, one.dtype) if fused else None
        )
    spare = one.plan.chunks.fused_tokens > 0 and has_spare_workspace(
        one.config, one.plan, one.most_tokens
    )
    workspace = mode is ExecutionMode.BATCH or spare
    sizes = tokens, workspace, one.plan.fp8_activations
    return Chosen(*plan_projection(shape, mode, one.target, one.dtype, *sizes))


def _norms(one: Setting, mode: ExecutionMode, tokens: int) -> Chosen:
    if mode is ExecutionMode.BATCH:
        return Chosen("sum_norm")  # behind o and down; in front of the first layer stands rms_norm
    if mode is not ExecutionMode.FUSED:
        return Chosen("rms_norm")
    linear = _linear(one, mode, tokens, layer_projections(one.config)["qkv"])
    return Chosen("norm" if "large" in linear.kernel.split(" + ") else WITHIN)


def _attention(one: Setting, plan: Callable[..., Any], tokens: int, option: bool) -> Chosen:
    if not one.plan.hopper:
        return Chosen("attention")
    config, gpu = one.config, one.target.gpu
    heads = config.q_heads, config.kv_heads, config.head_dim
    return Chosen(*plan(gpu, one.dtype, tokens, *heads, one.page_size, option, one.fp8_kv))


def _sampling(one: Setting) -> Chosen:
    if not one.plan.hopper:
        return Chosen("sample")
    why = _C.hopper_unsupported(one.target.gpu)
    return Chosen("sample (clusters)") if why is None else Chosen("sample", why)
