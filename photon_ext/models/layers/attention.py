"""Attention of a layer, and what all layers share of it: pages, tables, kernels.

What is particular to one layer (the scale, whether it rotates) is a field of `Attention`, which
`empty_attention` sets by the config; `PagedAttention` hands it to the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from photon_ext import ops
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    KernelPlan,
    balanced_attention_unsupported,
    dtype_name,
    target_of,
)
from photon_ext.models.layers.buffers import Activations, KvPool
from photon_ext.models.layers.projection import Execution, Projection, empty_projection
from photon_ext.models.projections import layer_projections
from photon_ext.models.rope import identity_tables, rope_tables
from photon_ext.runtime.step import StepKind

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors


@dataclass(frozen=True)
class Attention:
    """Attention of one layer: parameters and settings. H hidden, D head_dim.

    Attributes:
        index: of the layer; it selects the layer's part of the KV pool.
        qkv: [(q_heads + 2 kv_heads) * D, H]: q rows, then k, then v; it normalizes the residual.
        o: [H, q_heads * D].
        q_norm, k_norm: [D], gains of the RMS norms of heads before the rotation; None: no norm.
        scale: the factor of q's products with k.
        rotates: q and k are rotated by their position.
    """

    index: int
    qkv: Projection
    o: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    scale: float
    rotates: bool = True

    @property
    def first(self) -> Projection:
        """What reads the residual."""
        return self.qkv

    def slots(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a loader fills, by its name in a layer of a checkpoint; None: there is none."""
        yield "input_layernorm.weight", self.qkv.norm
        yield "self_attn.q_norm.weight", self.q_norm
        yield "self_attn.k_norm.weight", self.k_norm
        yield from self.qkv.slots()
        yield from self.o.slots()

    def run(self, execution: Execution, paged: PagedAttention, following: Projection) -> None:
        """Adds to the residual, which `following` reads next."""
        buffers = execution.buffers
        execution.project(buffers.qkv, execution.hidden, self.qkv)
        paged.attend(self, execution.step, buffers, execution.early)
        execution.begin(self.o, buffers.attention)
        execution.add(self.o, buffers.attention, following)


def empty_attention(
    config: ModelConfig, index: int, empty: Callable[..., torch.Tensor]
) -> Attention:
    """That of the layer of this index; `empty(*shape)` makes tensors."""
    shapes = layer_projections(config, index)
    return Attention(
        index,
        qkv=empty_projection(shapes["qkv"], empty),
        o=empty_projection(shapes["o"], empty),
        q_norm=empty(config.head_dim) if config.qk_norm else None,
        k_norm=empty(config.head_dim) if config.qk_norm else None,
        scale=config.attention_scale or config.head_dim**-0.5,
        rotates=index not in config.unrotated,
    )


# --- what layers share ----------------------------------------------------------------------------


class AttentionWords(NamedTuple):
    """Words of the workspaces (float32), of decode tokens and of chunks dealt evenly, and of the
    plan by which a step deals these (int32).
    """

    decode: int
    chunks: int
    chunk_plan: int


def attention_words(
    config: ModelConfig,
    plan: KernelPlan,
    max_step_tokens: int,
    max_segments: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fp8_kv: bool,
) -> AttentionWords:
    """What the plan's kernels need in steps of up to so many tokens and segments. Chunks of exact
    attention have a workspace only where none of these steps would have to do without.
    """
    decode = chunks = chunk_plan = 0
    if plan.hopper:
        heads = config.q_heads, config.kv_heads, config.head_dim
        decode = ops.attention_workspace_words(max_segments, *heads)
    if plan.balanced_attention:
        target, name, exact = target_of(device), dtype_name(dtype), plan.exact_attention
        asked = page_size, fp8_kv, max_step_tokens if exact else 1
        if balanced_attention_unsupported(config, target, name, *asked) is None:
            ctas = most_ctas(device)
            chunks = ops.chunk_workspace_words(config.head_dim, ctas, exact)
            chunk_plan = ops.chunk_plan_words(max_step_tokens, ctas, exact)
    return AttentionWords(decode, chunks, chunk_plan)


class PagedAttention:
    """The KV pool, cos/sin tables and workspaces of a decoder's layers.

    Attributes:
        nbytes: memory of tables and workspaces.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[Attention],
        kv: KvPool,
        dtype: torch.dtype,
        max_len: int,
        max_step_tokens: int,
        max_segments: int,
        plan: KernelPlan,
    ) -> None:
        """`dtype`: of the model; `max_len`: positions; `max_step_tokens`, `max_segments`: of a
        step.
        """
        _, page_size, _, _ = kv.keys[0].shape
        device, fp8_kv = kv.keys[0].device, kv.scales[0] is not None
        hopper = plan.hopper
        self._config, self._kv, self._hopper, self._batch = config, kv, hopper, plan.batch_attention
        self._exact = plan.exact_attention
        self._tables = {
            rotates: (rope_tables if rotates else identity_tables)(config, max_len, device)
            for rotates in {layer.rotates for layer in layers}
        }
        self._side = torch.cuda.Stream(device) if hopper and device.type == "cuda" else None
        sizes = max_step_tokens, max_segments, page_size
        words = attention_words(config, plan, *sizes, dtype, device, fp8_kv)
        dtypes = torch.float32, torch.float32, torch.int32
        self._workspace, self._chunk_workspace, self._chunk_plan = (
            torch.zeros(count, dtype=dtype, device=device) if count else None
            for count, dtype in zip(words, dtypes, strict=True)
        )
        tables = chain.from_iterable(self._tables.values())
        self.nbytes = 4 * sum(words) + sum(table.nbytes for table in tables)

    def begin(self, step: StepTensors, buffers: Activations) -> None:
        """What the attention of all layers of a step shares: how its chunks are dealt out."""
        workspace, plan = self._chunk_workspace, self._chunk_plan
        if step.kind is StepKind.DECODE or workspace is None or plan is None:
            return
        q, _, _, _ = self._heads(buffers)
        ops.chunk_plan_into(
            plan,
            q,
            self._kv.keys[0],
            self._kv.values[0],
            step.decode_meta,
            step.page_table,
            workspace,
            step.counts if step.kind is StepKind.MIXED else None,
            exact=self._exact,
        )

    def attend(
        self, layer: Attention, step: StepTensors, buffers: Activations, early: bool
    ) -> None:
        """Rotates q and k, appends k and v to the rows' pages, and attends: `buffers.qkv` to
        `buffers.attention`. `early`: kernels let the next one start early.
        """
        if step.kind is StepKind.MIXED:
            self._mixed(layer, step, buffers, early)
        elif step.kind is StepKind.DECODE and self._hopper:
            self._decode(layer, step, buffers, early=True)
        else:
            self._chunks(layer, step, buffers, None)

    def _mixed(
        self, layer: Attention, step: StepTensors, buffers: Activations, early: bool
    ) -> None:
        """`attend` for decode tokens and chunks, by two kernels; each leaves the other's tokens
        alone. They run side by side, on two streams, but not where the order of one stream lets
        them start early.
        """
        side = self._side
        if side is None or early:
            self._chunks(layer, step, buffers, step.counts)
            self._decode(layer, step, buffers, early)
            return
        main = torch.cuda.current_stream(side.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._chunks(layer, step, buffers, step.counts)
        self._decode(layer, step, buffers, early)
        main.wait_stream(side)

    def _decode(
        self, layer: Attention, step: StepTensors, buffers: Activations, early: bool
    ) -> None:
        """`attend` for the leading tokens, which decode, in one op; chunks begin behind them.

        `early`: it may start before the kernel in front of it has ended, which writes nothing but
        q, k and v.
        """
        q, k, v, attention = (heads[: step.decode_tokens] for heads in self._heads(buffers))
        ops.fused_attention_decode_into(
            attention,
            q,
            k,
            v,
            self._kv.keys[layer.index],
            self._kv.values[layer.index],
            step.decode_meta[: step.decode_tokens],
            step.page_table,
            *self._tables[layer.rotates],
            layer.scale,
            layer.q_norm,
            layer.k_norm,
            self._config.rms_eps,
            self._workspace,
            hopper=self._hopper,
            pdl=early,
            batch=self._batch,
            kv_scale=self._kv.scales[layer.index],
        )

    def _chunks(
        self, layer: Attention, step: StepTensors, buffers: Activations, counts: torch.Tensor | None
    ) -> None:
        """`attend` for any tokens, but with counts not for those that are decode tokens."""
        keys, values = self._kv.keys[layer.index], self._kv.values[layer.index]
        scales = self._kv.scales[layer.index]
        q, k, v, attention = self._heads(buffers)
        ops.rope_append_kv_(
            q,
            k,
            v,
            keys,
            values,
            step.decode_meta,
            step.page_table,
            *self._tables[layer.rotates],
            layer.q_norm,
            layer.k_norm,
            self._config.rms_eps,
            counts,
            scales,
        )
        ops.paged_attention_into(
            attention,
            q,
            keys,
            values,
            step.decode_meta,
            # without those of decode tokens, one each: they would have a tile each
            step.segments if counts is None else step.segments[step.decode_tokens :],
            step.page_table,
            layer.scale,
            hopper=self._hopper,
            counts=counts,
            workspace=self._chunk_workspace,
            pdl=True,  # what it reads ahead was there before the step's first layer
            kv_scale=scales,
            plan=self._chunk_plan,
            exact=self._exact,
        )

    def _heads(
        self, buffers: Activations
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views of `buffers.qkv`, and `buffers.attention`: [T, heads, D] each."""
        config = self._config
        heads = buffers.qkv.view(-1, config.q_heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [config.q_heads, config.kv_heads, config.kv_heads], dim=1)
        return q, k, v, buffers.attention.view(-1, config.q_heads, config.head_dim)


def most_ctas(device: torch.device) -> int:
    """How many CTAs of a kernel run that has one on each SM; where there are none, some."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
