"""Decoder: the forward of a model on the photon_ext ops.

A step is described on the device only (decode_meta, segments, counts, page_table), buffers have
fixed addresses, and nothing is allocated, so a forward can be captured once per shape and replayed
at any position. There are three ways through a layer: op by op, with residual adds folded into the
norm that follows, on every device and with torch's matrix products; with the Hopper kernels for a
batch, by linears that end in SwiGLU or in the next norm; and, with the other Hopper kernels, by
linears fused with what comes before or after them, around the attention of a decode step (five
ops a layer), of chunks (six), or of a mixed step, where the counts on the device tell decode tokens
from chunks (seven).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from photon_ext import ops
from photon_ext.errors import ConfigError
from photon_ext.layout import Count
from photon_ext.models.attention import DecoderAttention
from photon_ext.models.buffers import Activations, allocate_activations, allocate_kv_pool
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    KernelPlan,
    Way,
    Ways,
    dtype_name,
    even_attention_misfit,
    link_misfit,
    plan_for,
    target_of,
)
from photon_ext.models.region import RegionSteps
from photon_ext.models.weights import DecoderWeights, LayerWeights, Linear
from photon_ext.runtime.step import StepKind

if TYPE_CHECKING:
    from photon_ext.models.lora import LoraSlots, Place
    from photon_ext.models.region import RegionHeads
    from photon_ext.runtime.step import StepTensors


class Decoder:
    """A model with its KV pool and activation buffers, on the device and in the dtype of its
    weights.

    Not thread-safe: its buffers are those of one forward at a time.

    Attributes:
        config, weights: what runs.
        plan: by which kernels.
        max_step_tokens, max_segments: largest T and R of a step.
        max_len: positions that a row may use.
        page_size, num_pages: geometry of the KV pool; page indexes come from the step's page table.
        activation_bytes, kv_bytes: memory held besides the weights.
        embeds: [embeds_tokens, hidden], on the device: of the token -2 - i the i-th, which whoever
            feeds it writes before; None: there are no places.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_step_tokens: int,
        max_segments: int,
        max_len: int,
        page_size: int,
        num_pages: int,
        plan: KernelPlan | None = None,
        lora: LoraSlots | None = None,
        embeds_tokens: int = 0,
        region: RegionHeads | None = None,
    ) -> None:
        """Allocates everything that steps will use.

        `plan`: which kernels run, captured or not; None: the portable ones, and torch's products in
        CUDA steps of many tokens.
        `lora`: the adapters that rows may have, in steps that say so (`StepTensors.lora`).
        `embeds_tokens`: places for embeddings in the place of tokens.
        `region`: heads for spatial answers, in steps that say so (`StepTensors.spatial`).
        Raises ConfigError for a size that is not positive, or a `max_len` beyond what the model was
        trained for or its window of attention.
        """
        sizes = {
            "max_step_tokens": max_step_tokens,
            "max_segments": max_segments,
            "max_len": max_len,
            "page_size": page_size,
            "num_pages": num_pages,
        }
        for name, value in sizes.items():
            if value <= 0:
                raise ConfigError(f"Decoder: {name} is {value}, expected a positive number")
        config.check_max_len(max_len)
        self.config, self.weights = config, weights
        self.max_step_tokens, self.max_segments, self.max_len = (
            max_step_tokens,
            max_segments,
            max_len,
        )
        self.page_size, self.num_pages = page_size, num_pages
        self.plan, self.lora = plan or plan_for(config, weights, "portable"), lora
        target, dtype = target_of(weights.device), dtype_name(weights.dtype)
        self._has_links = link_misfit(config, target, dtype) is None
        self._kv = allocate_kv_pool(config, num_pages, page_size, weights.dtype, weights.device)
        even = even_attention_misfit(config, target, dtype, page_size) is None and self.plan.even
        self._attention = DecoderAttention(config, self._kv, max_len, max_segments, self.plan, even)
        self._arena = allocate_activations(
            config, max_step_tokens, max_segments, weights.dtype, weights.device
        )
        self._linear_workspace = self._spare_words() if self.plan.chunks.fused_tokens else None
        self._batch_workspace = self._batch_words()
        self.embeds = (
            torch.zeros(embeds_tokens, config.hidden, dtype=weights.dtype, device=weights.device)
            if embeds_tokens
            else None
        )
        self._head = Linear(weights.lm_head)
        self._region = (
            RegionSteps(region, config.vocab, max_step_tokens, max_segments, weights.embedding)
            if region is not None
            else None
        )

    def _spare_words(self) -> torch.Tensor | None:
        """The workspace of the linears that normalize many tokens: the buffer of gate and up, which
        fused layers do not use. None: a narrow MLP has too little; then they go in groups.
        """
        spare = self._arena.activations.gate_up.view(-1).view(torch.float32)
        tokens = max(self.max_step_tokens, self.max_segments)
        needed = ops.linear_workspace_words(tokens, self.config.hidden)
        if self.lora is not None:  # with adapters, fused layers use that buffer
            return spare.new_empty(needed)
        return spare if spare.numel() >= needed else None

    def _batch_words(self) -> torch.Tensor | None:
        """The workspace of a batch's linears."""
        most = max(self.plan.decode.batch_tokens, self.plan.chunks.batch_tokens)
        if most == 0:
            return None
        tokens = min(most, self.max_step_tokens)
        words = ops.linear_norm_workspace_words(tokens, self.config.hidden)
        return torch.zeros(words, dtype=torch.float32, device=self.weights.device)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab

    @property
    def activation_bytes(self) -> int:
        workspace = None if self.lora is None else self._linear_workspace  # else of the arena
        others = (
            self._attention,
            self.lora,
            self.embeds,
            self._region,
            workspace,
            self._batch_workspace,
        )
        return self._arena.memory.nbytes + sum(one.nbytes for one in others if one is not None)

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    def forward(self, step: StepTensors) -> None:
        """Enqueues the forward of a step and assigns `step.logits`, [R, vocab], a view of a buffer
        that the next forward rewrites.

        Dead tokens write no KV. Logits of segments that are dead or not sampled are undefined. A
        step of more tokens or segments than it was made for is a ConfigError.
        """
        num_tokens, segments = step.decode_meta.shape[0], step.segments.shape[0]
        if num_tokens > self.max_step_tokens or segments > self.max_segments:
            raise ConfigError(
                f"Decoder: a step of {num_tokens} tokens and {segments} segments, "
                f"made for up to {self.max_step_tokens} and {self.max_segments}; raise "
                "max_step_tokens or max_segments"
            )
        buffers = self._arena.activations.leading(num_tokens, segments)
        ops.embedding_into(buffers.residual, step.decode_meta, self.weights.embedding, self.embeds)
        if step.spatial and self._region is not None:
            self._region.embed(buffers.residual, step)
        ways = self.plan.decode if step.kind is StepKind.DECODE else self.plan.chunks
        counts = step.counts[Count.TOKENS :]
        way = ways.besides_batch(num_tokens) if step.lora else ways.of(num_tokens)
        if way is Way.FUSED and step.lora and not self._has_links:
            way = Way.OWN
        if way is Way.FUSED:
            self._fused_layers(step, buffers, counts)
        elif way is Way.BATCH:
            self._batch_layers(step, buffers, counts)
        else:
            self._layers(step, buffers, counts, way)
        if step.score is not None:
            self._score_tokens(step, buffers, ways)
        self._write_logits(step, buffers, ways.besides_batch(segments))
        step.logits = buffers.logits

    def _write_logits(self, step: StepTensors, buffers: Activations, way: Way) -> None:
        """From the last layer's output to `buffers.logits`."""
        sampled = self._head_input(buffers, way)
        if step.kind is not StepKind.DECODE:  # decode tokens are one to one with segments already
            ops.select_tokens_into(buffers.selected, sampled, step.segments)
            sampled = buffers.selected
        counts = step.counts[Count.SEGMENTS :]
        self._project(buffers.logits, sampled, self._head, counts, way)
        if step.spatial and self._region is not None:
            step.value_logits = self._region.logits(len(sampled))
            self._project(step.value_logits, sampled, self._region.head, counts, way)

    def _score_tokens(self, step: StepTensors, buffers: Activations, ways: Ways) -> None:
        """`step.score` for all chunk tokens, as many at a time as there is room for logits."""
        room, end = self._arena.activations.logits, len(step.decode_meta)
        assert step.score is not None
        for begin in range(step.decode_tokens, end, len(room)):
            logits = room[: end - begin]
            way = ways.besides_batch(len(logits))
            part = self._head_input(buffers, way)[begin : begin + len(logits)]
            self._project(logits, part, self._head, None, way)
            step.score(logits, begin)

    def _head_input(self, buffers: Activations, way: Way) -> torch.Tensor:
        """What the head reads. Fused layers do not write `normed`; the head, which has no more
        tokens than they, is then fused, too.
        """
        return buffers.residual if way is Way.FUSED else buffers.normed

    def _project(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        head: Linear,
        counts: torch.Tensor | None,
        way: Way,
    ) -> None:
        """Norm and head in one op, or the head alone."""
        if way is Way.FUSED:
            self._norm_linear(logits, hidden, self.weights.final_norm, head, counts)
        else:
            _linear(logits, hidden, head, counts, way)

    def _layers(
        self, step: StepTensors, buffers: Activations, counts: torch.Tensor, way: Way
    ) -> None:
        """From `buffers.residual`, the embeddings, to the output of the last layer: there, and
        normalized in `buffers.normed`.
        """
        eps = self.config.rms_eps
        for index, layer in enumerate(self.weights.layers):
            if index == 0:
                ops.rms_norm_into(buffers.normed, buffers.residual, layer.input_norm, eps)
            else:
                ops.add_rms_norm_into(
                    buffers.normed, buffers.residual, buffers.projected, layer.input_norm, eps
                )
            self._shrink(buffers.normed, index, "qkv", step)
            _linear(buffers.qkv, buffers.normed, layer.qkv, counts, way)
            self._expand(buffers.qkv, index, "qkv", step)
            self._attention.run(index, layer, step, buffers, fused=False)
            self._shrink(buffers.attention, index, "o", step)
            _linear(buffers.projected, buffers.attention, layer.o, counts, way)
            self._expand(buffers.projected, index, "o", step)
            ops.add_rms_norm_into(
                buffers.normed, buffers.residual, buffers.projected, layer.post_norm, eps
            )
            self._shrink(buffers.normed, index, "gate_up", step)
            _linear(buffers.gate_up, buffers.normed, layer.gate_up, counts, way)
            self._expand(buffers.gate_up, index, "gate_up", step)
            ops.silu_mul_into(buffers.act, buffers.gate_up)
            self._shrink(buffers.act, index, "down", step)
            _linear(buffers.projected, buffers.act, layer.down, counts, way)
            self._expand(buffers.projected, index, "down", step)
        ops.add_rms_norm_into(
            buffers.normed, buffers.residual, buffers.projected, self.weights.final_norm, eps
        )

    def _fused_layers(self, step: StepTensors, buffers: Activations, counts: torch.Tensor) -> None:
        """From `buffers.residual`, the embeddings, to the output of the last layer, there.

        All kernels but chunk attention's start early: none writes a weight, and what else they read
        ahead (counts, decode_meta, page table, old keys and values) was complete when the embedding
        let the first of them start: it waits for the head of the step. Behind a kernel that does
        not let the next one start, one starts when that has ended.
        """
        residual = buffers.residual
        self._link(residual, step, None, (0, "qkv"))
        for index, layer in enumerate(self.weights.layers):
            self._norm_linear(buffers.qkv, residual, layer.input_norm, layer.qkv, counts)
            self._link(buffers.qkv, step, (index, "qkv"), None)
            self._attention.run(index, layer, step, buffers, fused=True)
            self._link(buffers.attention, step, None, (index, "o"))
            ops.linear_residual_(
                residual, buffers.attention, *layer.o, counts, hopper=True, pdl=True
            )
            self._link(residual, step, (index, "o"), (index, "gate_up"))
            self._fused_gate_up(index, layer, step, buffers, counts)
            ops.linear_residual_(residual, buffers.act, *layer.down, counts, hopper=True, pdl=True)
            following = (index + 1, "qkv") if index + 1 < len(self.weights.layers) else None
            self._link(residual, step, (index, "down"), following)

    def _batch_layers(self, step: StepTensors, buffers: Activations, counts: torch.Tensor) -> None:
        """From `buffers.residual`, the embeddings, to the output of the last layer: there, and
        normalized in `buffers.normed`. What starts early is as in fused layers.
        """
        layers, eps = self.weights.layers, self.config.rms_eps
        ops.rms_norm_into(buffers.normed, buffers.residual, layers[0].input_norm, eps)
        norms = [layer.input_norm for layer in layers[1:]] + [self.weights.final_norm]
        for index, (layer, following) in enumerate(zip(layers, norms, strict=True)):
            ops.linear_into(buffers.qkv, buffers.normed, *layer.qkv, counts, hopper=True, pdl=True)
            self._attention.run(index, layer, step, buffers, fused=True)
            self._batch_linear_norm(buffers, buffers.attention, layer.o, layer.post_norm, counts)
            ops.swiglu_into(
                buffers.act, buffers.normed, *layer.gate_up, counts, hopper=True, pdl=True
            )
            self._batch_linear_norm(buffers, buffers.act, layer.down, following, counts)

    def _batch_linear_norm(
        self,
        buffers: Activations,
        x: torch.Tensor,
        linear: Linear,
        norm: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Adds to `buffers.residual`, which is normalized in `buffers.normed`."""
        ops.linear_norm_into(
            buffers.normed,
            buffers.residual,
            x,
            linear.weight,
            norm,
            self.config.rms_eps,
            linear.bias,
            counts,
            hopper=True,
            pdl=True,
            workspace=self._batch_workspace,
        )

    def _fused_gate_up(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        counts: torch.Tensor,
    ) -> None:
        """`buffers.residual` to `buffers.act`: in one op, or with adapters in two, which give rows
        without one the same bits.
        """
        if step.lora:
            residual, gate_up = buffers.residual, buffers.gate_up
            self._norm_linear(gate_up, residual, layer.post_norm, layer.gate_up, counts)
            self._link(gate_up, step, (index, "gate_up"), (index, "down"), buffers.act)
            return
        ops.norm_swiglu_into(
            buffers.act,
            buffers.residual,
            layer.post_norm,
            self.config.rms_eps,
            *layer.gate_up,
            counts,
            hopper=True,
            pdl=True,
            workspace=self._linear_workspace,
        )

    def _norm_linear(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        norm: torch.Tensor,
        linear: Linear,
        counts: torch.Tensor | None,
    ) -> None:
        ops.norm_linear_into(
            out,
            x,
            norm,
            self.config.rms_eps,
            *linear,
            counts,
            hopper=True,
            pdl=True,
            workspace=self._linear_workspace,
        )

    def _shrink(self, x: torch.Tensor, index: int, name: str, step: StepTensors) -> None:
        """In a step with adapters, what they make of the input of the linear `name` of layer
        `index`.
        """
        if step.lora:
            assert self.lora is not None
            self.lora.shrink(x, index, name, step)

    def _expand(self, out: torch.Tensor, index: int, name: str, step: StepTensors) -> None:
        """Adds that to the linear's output."""
        if step.lora:
            assert self.lora is not None
            self.lora.expand(out, index, name, step)

    def _link(
        self,
        x: torch.Tensor,
        step: StepTensors,
        ended: Place | None,
        begun: Place | None,
        act: torch.Tensor | None = None,
    ) -> None:
        """In a step with adapters, what they do between the linear `ended`, whose output is `x`,
        and the linear `begun`, whose input is `act` or x.
        """
        if step.lora:
            assert self.lora is not None
            self.lora.link(x, step, ended, begun, self._norm_before(begun), act)

    def _norm_before(self, place: Place | None) -> torch.Tensor | None:
        """The norm of a linear's input, if it has one."""
        if place is None:
            return None
        layer = self.weights.layers[place[0]]
        return {"qkv": layer.input_norm, "gate_up": layer.post_norm}.get(place[1])


def _linear(
    out: torch.Tensor,
    x: torch.Tensor,
    linear: Linear,
    counts: torch.Tensor | None,
    way: Way,
) -> None:
    if way is Way.OWN:
        ops.linear_into(out, x, linear.weight, linear.bias, counts)
    elif linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
