"""Decoder: the forward of Llama and Qwen3 models on the photon_ext ops.

A step is described on the device only (decode_meta, segments, counts, page_table), buffers have
fixed addresses, and nothing is allocated, so a forward can be captured once per shape and replayed
at any position. There are two ways through a layer: op by op, with residual adds folded into the
norm that follows, on every device and with torch's matrix products; and, with the Hopper kernels,
by linears fused with what comes before or after them, around the attention of a decode step (five
ops a layer), of chunks (six), or of a mixed step, where the counts on the device tell decode tokens
from chunks (seven).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from photon_ext import ops
from photon_ext.errors import ConfigError
from photon_ext.layout import Count
from photon_ext.models.buffers import Activations, allocate_activations, allocate_kv_pool
from photon_ext.models.config import ModelConfig
from photon_ext.models.hopper_fit import linears_misfit
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import DecoderWeights, LayerWeights, Linear
from photon_ext.runtime.step import StepKind

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors

GEMM_TOKENS = 32  # CUDA steps of more tokens than this multiply through torch (cuBLAS)
# the same with the Hopper linears, which read each weight once for so many tokens
HOPPER_GEMM_TOKENS = 64


class Decoder:
    """A model with its KV pool and activation buffers, on the device and in the dtype of its
    weights.

    Not thread-safe: its buffers are those of one forward at a time.

    Attributes:
        config, weights: what runs.
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
        gemm_tokens: int | None = GEMM_TOKENS,
        hopper: bool = False,
        embeds_tokens: int = 0,
    ) -> None:
        """Allocates everything that steps will use.

        `gemm_tokens`: on CUDA, steps of more tokens multiply through torch (and of more than 64,
        where the Hopper linears run), captured or not: that is fast, but the order of its sums
        depends on T; None: never, so that a row's result depends on its own tokens alone.
        `hopper`: use the fused ops with their Hopper kernels, see photon_ext.ops, in decode steps
        and, where these take the model (see hopper_fit), in steps with chunks. Their linears give a
        token the same bits in every step; their attention gives it others in a chunk than where it
        decodes, but no others for what rides beside it.
        `embeds_tokens`: places for embeddings in the place of tokens.
        Raises ConfigError for a size that is not positive, or a `max_len` beyond what the model was
        trained for.
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
        if max_len > config.max_positions:
            raise ConfigError(
                f"Decoder: max_len is {max_len}, the model was made for {config.max_positions} "
                "positions; ask for no more than that"
            )
        self.config, self.weights = config, weights
        self.max_step_tokens, self.max_segments, self.max_len = (
            max_step_tokens,
            max_segments,
            max_len,
        )
        self.page_size, self.num_pages = page_size, num_pages
        self._hopper = hopper
        misfit = linears_misfit(config, weights.dtype, weights.device) if hopper else None
        self._hopper_prefill = hopper and misfit is None
        self._gemm_tokens = gemm_tokens
        self._side = (
            torch.cuda.Stream(weights.device) if hopper and weights.device.type == "cuda" else None
        )
        self._scale = config.head_dim**-0.5
        self._cos, self._sin = rope_tables(config, max_len, weights.device)
        self._kv = allocate_kv_pool(config, num_pages, page_size, weights.dtype, weights.device)
        self._arena = allocate_activations(
            config, max_step_tokens, max_segments, weights.dtype, weights.device
        )
        self._linear_workspace = self._spare_words() if self._hopper_prefill else None
        self.embeds = (
            torch.zeros(embeds_tokens, config.hidden, dtype=weights.dtype, device=weights.device)
            if embeds_tokens
            else None
        )
        self._head = Linear(weights.lm_head)
        words = (
            ops.attention_workspace_words(
                max_segments, config.q_heads, config.kv_heads, config.head_dim
            )
            if hopper
            else 0
        )
        self._workspace = (
            torch.zeros(words, dtype=torch.float32, device=weights.device) if hopper else None
        )

    def _spare_words(self) -> torch.Tensor | None:
        """The workspace of the linears that normalize many tokens: the buffer of gate and up, which
        fused layers do not use. None: a narrow MLP has too little; then they go in groups.
        """
        spare = self._arena.activations.gate_up.view(-1).view(torch.float32)
        tokens = max(self.max_step_tokens, self.max_segments)
        needed = ops.linear_workspace_words(tokens, self.config.hidden)
        return spare if spare.numel() >= needed else None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab

    @property
    def activation_bytes(self) -> int:
        return self._arena.memory.nbytes + (
            0 if self._workspace is None else self._workspace.nbytes
        )

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
        fused = self._hopper if step.kind is StepKind.DECODE else self._hopper_prefill
        counts, through_torch = step.counts[Count.TOKENS :], self._through_torch(num_tokens, fused)
        if fused and not through_torch:
            self._fused_layers(step, buffers, counts)
        else:
            self._layers(step, buffers, counts, through_torch)
        self._write_logits(step, buffers, fused, self._through_torch(segments, fused))
        step.logits = buffers.logits

    def _through_torch(self, tokens: int, fused: bool) -> bool:
        """Whether linears of so many tokens are torch's; `fused`: else they are the Hopper ones."""
        if self._gemm_tokens is None or self.weights.device.type != "cuda":
            return False
        return tokens > (max(self._gemm_tokens, HOPPER_GEMM_TOKENS) if fused else self._gemm_tokens)

    def _write_logits(
        self, step: StepTensors, buffers: Activations, fused: bool, through_torch: bool
    ) -> None:
        """From the last layer's output to `buffers.logits`; norm and head in one op, or the head
        alone, from `buffers.normed`.
        """
        one_op = fused and not through_torch
        sampled = buffers.residual if one_op else buffers.normed
        counts = step.counts[Count.SEGMENTS :]
        if step.kind is not StepKind.DECODE:  # decode tokens are one to one with segments already
            ops.select_tokens_into(buffers.selected, sampled, step.segments)
            sampled = buffers.selected
        if one_op:
            norm = self.weights.final_norm
            ops.norm_linear_into(
                buffers.logits,
                sampled,
                norm,
                self.config.rms_eps,
                *self._head,
                counts,
                hopper=True,
                pdl=True,
                workspace=self._linear_workspace,
            )
        else:
            _linear(buffers.logits, sampled, self._head, counts, through_torch)

    def _layers(
        self, step: StepTensors, buffers: Activations, counts: torch.Tensor, through_torch: bool
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
            _linear(buffers.qkv, buffers.normed, layer.qkv, counts, through_torch)
            self._attend(index, layer, step, buffers, fused=False)
            _linear(buffers.projected, buffers.attention, layer.o, counts, through_torch)
            ops.add_rms_norm_into(
                buffers.normed, buffers.residual, buffers.projected, layer.post_norm, eps
            )
            _linear(buffers.gate_up, buffers.normed, layer.gate_up, counts, through_torch)
            ops.silu_mul_into(buffers.act, buffers.gate_up)
            _linear(buffers.projected, buffers.act, layer.down, counts, through_torch)
        ops.add_rms_norm_into(
            buffers.normed, buffers.residual, buffers.projected, self.weights.final_norm, eps
        )

    def _fused_layers(self, step: StepTensors, buffers: Activations, counts: torch.Tensor) -> None:
        """From `buffers.residual`, the embeddings, to the output of the last layer, there.

        All but a chunk's attention start early: none writes a weight, and what else they read ahead
        (counts, decode_meta, page table, old keys and values) was complete when the embedding let
        the first of them start: it waits for the head of the step. Behind a kernel that does not
        let the next one start, one starts when that has ended.
        """
        eps, residual = self.config.rms_eps, buffers.residual
        for index, layer in enumerate(self.weights.layers):
            ops.norm_linear_into(
                buffers.qkv,
                residual,
                layer.input_norm,
                eps,
                *layer.qkv,
                counts,
                hopper=True,
                pdl=True,
                workspace=self._linear_workspace,
            )
            self._attend(index, layer, step, buffers, fused=True)
            ops.linear_residual_(
                residual, buffers.attention, *layer.o, counts, hopper=True, pdl=True
            )
            ops.norm_swiglu_into(
                buffers.act,
                residual,
                layer.post_norm,
                eps,
                *layer.gate_up,
                counts,
                hopper=True,
                pdl=True,
                workspace=self._linear_workspace,
            )
            ops.linear_residual_(residual, buffers.act, *layer.down, counts, hopper=True, pdl=True)

    def _heads(
        self, buffers: Activations
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views of `buffers.qkv`, and `buffers.attention`: [T, heads, D] each."""
        config = self.config
        heads = buffers.qkv.view(-1, config.q_heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [config.q_heads, config.kv_heads, config.kv_heads], dim=1)
        return q, k, v, buffers.attention.view(-1, config.q_heads, config.head_dim)

    def _attend(
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
            self._attend_mixed(index, layer, step, buffers, fused)
        elif step.kind is StepKind.DECODE and self._hopper:
            self._attend_decode(index, layer, step, buffers, fused)
        else:
            self._attend_chunks(index, layer, step, buffers, None)

    def _attend_mixed(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        fused: bool,
    ) -> None:
        """`_attend` for decode tokens and chunks, by two kernels each of which leaves the other's
        tokens alone: side by side, on two streams, but not where the order of one stream lets them
        start early.
        """
        side = self._side
        if side is None or fused:
            self._attend_chunks(index, layer, step, buffers, step.counts)
            self._attend_decode(index, layer, step, buffers, fused)
            return
        main = torch.cuda.current_stream(side.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._attend_chunks(index, layer, step, buffers, step.counts)
        self._attend_decode(index, layer, step, buffers, fused)
        main.wait_stream(side)

    def _attend_decode(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        fused: bool,
    ) -> None:
        """`_attend` for the leading tokens, which decode, in one op; chunks begin behind them.

        `fused`: behind a linear that lets it start.
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
            self.config.rms_eps,
            self._workspace,
            hopper=self._hopper,
            pdl=fused,
        )

    def _attend_chunks(
        self,
        index: int,
        layer: LayerWeights,
        step: StepTensors,
        buffers: Activations,
        counts: torch.Tensor | None,
    ) -> None:
        """`_attend` for any tokens, but with counts not for those that are decode tokens."""
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
            self.config.rms_eps,
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
        )


def _linear(
    out: torch.Tensor, x: torch.Tensor, linear: Linear, counts: torch.Tensor, through_torch: bool
) -> None:
    if not through_torch:
        ops.linear_into(out, x, linear.weight, linear.bias, counts)
    elif linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
