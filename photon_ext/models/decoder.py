"""Decoder: the forward of a model on the photon_ext ops.

A step is described on the device only (decode_meta, segments, counts, page_table), buffers have
fixed addresses, and nothing is allocated, so a forward can be captured once per shape and replayed
at any position. The forward is one loop over the layers (layers/block.py). The plan
chooses the execution mode, whose ops layers/projection.py has: op by op, with the Hopper linears
for a batch, or with the fused ones. With these a layer is five ops of a decode step, six of chunks,
and seven of a mixed step, where the counts on the device tell decode tokens from chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from photon_ext import ops
from photon_ext.checks import KvDtype
from photon_ext.errors import ConfigError
from photon_ext.layout import Count
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import (
    ExecutionMode,
    KernelPlan,
    dtype_name,
    link_unsupported,
    plan_for,
    target_of,
)
from photon_ext.models.layers.attention import PagedAttention
from photon_ext.models.layers.block import Block
from photon_ext.models.layers.buffers import (
    Activations,
    allocate_activations,
    allocate_kv_pool,
    allocate_workspaces,
    workspace_words,
)
from photon_ext.models.layers.fp8_execution import FP8_EXECUTIONS
from photon_ext.models.layers.projection import EXECUTIONS, Execution
from photon_ext.models.region import RegionSteps
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime.step import StepKind
from photon_ext.runtime.step_features import StepFeatures

if TYPE_CHECKING:
    from photon_ext.models.lora import LoraSlots
    from photon_ext.models.region import RegionHeads
    from photon_ext.runtime.step import StepTensors


class Decoder:
    """A model with its KV pool and activation buffers, on the device and in the dtype of its
    weights.

    Not thread-safe: its buffers are those of one forward at a time.

    Attributes:
        config, weights: what runs.
        plan: which kernels it runs.
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
        kv_dtype: KvDtype | None = None,
    ) -> None:
        """Allocates everything that steps will use.

        `plan`: which kernels run, captured or not; None: the portable ones, and torch's products in
        CUDA steps of many tokens.
        `lora`: the adapters that rows may have, in steps that say so (`StepTensors.features`).
        `embeds_tokens`: places for embeddings in the place of tokens.
        `region`: heads for spatial answers, in steps that say so, too.
        `kv_dtype`: how keys and values are stored; None: in the dtype of the weights.
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
        dtype, device = weights.dtype, weights.device
        self._has_links = link_unsupported(config, target_of(device), dtype_name(dtype)) is None
        blocks = _blocks(weights, lora)
        following = [*(block.first for block in blocks[1:]), weights.head]
        self._blocks = tuple(zip(blocks, following, strict=True))
        self._kv = allocate_kv_pool(config, num_pages, page_size, dtype, device, kv_dtype)
        attentions = [block.attention for block in blocks]
        self._attention = PagedAttention(
            config,
            attentions,
            self._kv,
            dtype,
            max_len,
            max_step_tokens,
            max_segments,
            self.plan,
        )
        self._arena = allocate_activations(config, max_step_tokens, max_segments, dtype, device)
        words = workspace_words(config, self.plan, max_step_tokens, max_segments, lora is not None)
        self._workspaces = allocate_workspaces(config, words, self.plan, self._arena)
        self.embeds = (
            torch.zeros(embeds_tokens, config.hidden, dtype=dtype, device=device)
            if embeds_tokens
            else None
        )
        self._region = (
            RegionSteps(region, weights.head, max_step_tokens, max_segments)
            if region is not None
            else None
        )
        others = self._attention, lora, self.embeds, self._region
        self.activation_bytes = self._arena.memory.nbytes + 4 * sum(words)
        self.activation_bytes += sum(one.nbytes for one in others if one is not None)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab

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
        self._attention.begin(step, buffers)
        table = self.weights.embedding
        ops.embedding_into(buffers.residual, step.decode_meta, table, self.embeds)
        if StepFeatures.SPATIAL in step.features and self._region is not None:
            self._region.embed(buffers.residual, step)
        modes = self.plan.decode if step.kind is StepKind.DECODE else self.plan.chunks
        adapted = StepFeatures.LORA in step.features
        mode = modes.besides_batch(num_tokens) if adapted else modes.of(num_tokens)
        if mode is ExecutionMode.FUSED and adapted and not self._has_links:
            mode = ExecutionMode.OWN
        self._run_layers(self._execution(mode, step, buffers, step.counts[Count.TOKENS :]))
        is_dense = self.weights.head.shape.is_dense
        if step.score is not None:
            self._score_tokens(step, buffers, lambda tokens: modes.head(tokens, mode, is_dense))
        self._write_logits(step, buffers, modes.head(segments, mode, is_dense))
        step.logits = buffers.logits

    def _execution(
        self,
        mode: ExecutionMode,
        step: StepTensors,
        buffers: Activations,
        counts: torch.Tensor | None,
    ) -> Execution:
        executions = FP8_EXECUTIONS if self.plan.fp8_activations else EXECUTIONS
        return executions[mode](step, buffers, self._workspaces, self.config.rms_eps, counts)

    def _run_layers(self, execution: Execution) -> None:
        """From `buffers.residual`, the embeddings, to the output of the last layer: there, and
        normalized in `execution.hidden` where the head is not to do that.
        """
        first, _ = self._blocks[0]
        execution.begin(first.first, execution.buffers.residual)
        for block, following in self._blocks:
            block.run(execution, self._attention, following)

    def _write_logits(self, step: StepTensors, buffers: Activations, mode: ExecutionMode) -> None:
        """From the last layer's output to `buffers.logits`. Fused layers do not normalize it; the
        head, which has no more tokens than they, is then fused, too.
        """
        execution = self._execution(mode, step, buffers, step.counts[Count.SEGMENTS :])
        sampled = execution.hidden
        if step.kind is not StepKind.DECODE:  # decode tokens are one to one with segments already
            ops.select_tokens_into(buffers.selected, sampled, step.segments)
            sampled = buffers.selected
        execution.project(buffers.logits, sampled, self.weights.head)
        if StepFeatures.SPATIAL in step.features and self._region is not None:
            step.value_logits = self._region.logits(len(sampled))
            execution.project(step.value_logits, sampled, self._region.head)

    def _score_tokens(
        self, step: StepTensors, buffers: Activations, mode_of: Callable[[int], ExecutionMode]
    ) -> None:
        """`step.score` for all chunk tokens, as many at a time as there is room for logits;
        `mode_of`: of a head of so many.
        """
        room, end = self._arena.activations.logits, len(step.decode_meta)
        assert step.score is not None
        for begin in range(step.decode_tokens, end, len(room)):
            logits = room[: end - begin]
            execution = self._execution(mode_of(len(logits)), step, buffers, None)
            part = execution.hidden[begin : begin + len(logits)]
            execution.project(logits, part, self.weights.head)
            step.score(logits, begin)


def _blocks(weights: DecoderWeights, lora: LoraSlots | None) -> tuple[Block, ...]:
    """The layers, with the adapters of slots where there are any."""
    if lora is None:
        return weights.layers
    pairs = zip(weights.layers, lora.layers, strict=True)
    return tuple(block.with_adapters(adapters) for block, adapters in pairs)
