"""Attention of a decoder: positions, the rows' pages, kernels for decode tokens and for chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from photon_ext import ops
from photon_ext.models.buffers import Activations, KvPool
from photon_ext.models.config import ModelConfig
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import LayerWeights
from photon_ext.runtime.step import StepKind

if TYPE_CHECKING:
    from photon_ext.models.kernel_plan import KernelPlan
    from photon_ext.runtime.step import StepTensors


class DecoderAttention:
    """What the layers of a decoder share of it: the KV pool, cos/sin cache and workspace.

    Attributes:
        nbytes: memory of the workspace.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: KvPool,
        max_len: int,
        max_segments: int,
        plan: KernelPlan,
        even: bool,
    ) -> None:
        """`max_len`: positions; `max_segments`: of a step; `even`: that of the plan, where it takes
        the model.
        """
        device = kv.keys[0].device
        hopper = plan.hopper
        self._config, self._kv, self._hopper, self._batch = config, kv, hopper, plan.batch_attention
        self._scale = config.head_dim**-0.5
        self._cos, self._sin = rope_tables(config, max_len, device)
        self._side = torch.cuda.Stream(device) if hopper and device.type == "cuda" else None
        self._workspace: torch.Tensor | None = None
        if hopper:
            words = ops.attention_workspace_words(
                max_segments, config.q_heads, config.kv_heads, config.head_dim
            )
            self._workspace = torch.zeros(words, dtype=torch.float32, device=device)
        self._chunk_workspace: torch.Tensor | None = None
        if even:
            words = ops.chunk_workspace_words(config.head_dim, most_ctas(device))
            self._chunk_workspace = torch.zeros(words, dtype=torch.float32, device=device)
        held = self._workspace, self._chunk_workspace
        self.nbytes = sum(one.nbytes for one in held if one is not None)

    def run(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        fused: bool,
    ) -> None:
        """Rotates q and k, appends k and v to the rows' pages, and attends: `buffers.qkv` to
        `buffers.attention`.
        """
        if step.kind is StepKind.MIXED:
            self._mixed(index, layer, step, buffers, fused)
        elif step.kind is StepKind.DECODE and self._hopper:
            self._decode(index, layer, step, buffers, early=True)
        else:
            self._chunks(index, layer, step, buffers, None)

    def _mixed(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        fused: bool,
    ) -> None:
        """`run` for decode tokens and chunks, by two kernels each of which leaves the other's
        tokens alone: side by side, on two streams, but not where the order of one stream lets them
        start early.
        """
        side = self._side
        if side is None or fused:
            self._chunks(index, layer, step, buffers, step.counts)
            self._decode(index, layer, step, buffers, fused)
            return
        main = torch.cuda.current_stream(side.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._chunks(index, layer, step, buffers, step.counts)
        self._decode(index, layer, step, buffers, fused)
        main.wait_stream(side)

    def _decode(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        early: bool,
    ) -> None:
        """`run` for the leading tokens, which decode, in one op; chunks begin behind them.

        `early`: it may start before the kernel in front of it has ended, which writes nothing but
        q, k and v.
        """
        q, k, v, attention = (heads[: step.decode_tokens] for heads in self._heads(buffers))
        ops.fused_attention_decode_into(
            attention,
            q,
            k,
            v,
            self._kv.keys[index],
            self._kv.values[index],
            step.decode_meta[: step.decode_tokens],
            step.page_table,
            self._cos,
            self._sin,
            self._scale,
            layer.q_norm,
            layer.k_norm,
            self._config.rms_eps,
            self._workspace,
            hopper=self._hopper,
            pdl=early,
            batch=self._batch,
        )

    def _chunks(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        counts: torch.Tensor | None,
    ) -> None:
        """`run` for any tokens, but with counts not for those that are decode tokens."""
        keys, values = self._kv.keys[index], self._kv.values[index]
        q, k, v, attention = self._heads(buffers)
        ops.rope_append_kv_(
            q,
            k,
            v,
            keys,
            values,
            step.decode_meta,
            step.page_table,
            self._cos,
            self._sin,
            layer.q_norm,
            layer.k_norm,
            self._config.rms_eps,
            counts,
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
            self._scale,
            hopper=self._hopper,
            counts=counts,
            workspace=self._chunk_workspace,
            pdl=True,  # what it reads ahead was there before the step's first layer
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
