"""What a step enqueues, in order: head, the user's forward, sampling, publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from photon_ext import ops
from photon_ext.errors import ConfigError
from photon_ext.layout import (
    COUNTS_SIZE,
    LOGPROB_WIDTH,
    MASK_KEY_COLUMNS,
    META_COLUMNS,
    NO_PAGE,
    RECORD_WIDTH,
    SEGMENT_COLUMNS,
    InputLayout,
    MaskLayout,
)
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.prompt_scores import PromptScores
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import StepKey, StepTensors

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tables(NamedTuple):
    """The device tables, int32, in the order of layout.DeltaTable; the compute stream's alone."""

    row_state: torch.Tensor
    page_table: torch.Tensor
    stop_ids: torch.Tensor
    biases: torch.Tensor
    token_counts: torch.Tensor
    seen_bits: torch.Tensor

    @classmethod
    def zeros(cls, table: RowTable, device: torch.device) -> Tables:
        """Of dead rows without pages."""
        shapes = [(table.rows, width) for width in table.widths]
        made = cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
        made.page_table.fill_(NO_PAGE)
        return made


class SlotMemory(NamedTuple):
    """A slot's own device memory, int32: packed step input, output, masks with keys."""

    input: torch.Tensor
    output: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def zeros(cls, inputs: InputLayout, masks: MaskLayout, device: torch.device) -> SlotMemory:
        """As large as the layouts say."""
        shapes = ((inputs.words,), (inputs.outputs.capacity,), (masks.capacity,))
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


class SharedMemory(NamedTuple):
    """Step memory, int32, of all graphs and slots, which run one after the other (I1)."""

    decode_meta: torch.Tensor
    counts: torch.Tensor
    sampled: torch.Tensor
    row_errors: torch.Tensor
    automata: torch.Tensor

    @classmethod
    def zeros(
        cls, num_tokens: int, segments: int, device: torch.device, automaton_words: int = 0
    ) -> SharedMemory:
        """For steps of at most so many, and automata of so many words."""
        automata = (automaton_words,)
        shapes = ((num_tokens, META_COLUMNS), (COUNTS_SIZE,), (segments,), (segments,), automata)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


class StepProgram:
    """Enqueues the parts of a step for one slot's memory."""

    def __init__(
        self,
        spec: StepSpec,
        tables: Tables,
        shared: SharedMemory,
        slot: SlotMemory,
        inputs: InputLayout,
        masks: MaskLayout,
        hopper: bool,
    ) -> None:
        self._spec = spec
        self._tables = tables
        self._shared = shared
        self._slot = slot
        self._masks = masks
        self._hopper = hopper
        self._segments = slot.input[: inputs.staged_offset].view(-1, SEGMENT_COLUMNS)
        self._staged = slot.input[inputs.staged_offset :]
        self._deltas = slot.input[inputs.delta_offset :]
        self._scores: PromptScores | None = None
        begin = inputs.outputs.logprob_offset
        self._records = slot.output[:begin].view(-1, RECORD_WIDTH)
        self._logprobs = slot.output[begin:].view(-1, LOGPROB_WIDTH)

    @property
    def memory(self) -> tuple[Tables, SharedMemory, SlotMemory]:
        """What the step's own kernels read and write, the forward's buffers apart."""
        return self._tables, self._shared, self._slot

    def prepare_scores(self, key: StepKey, targets: Sequence[int]) -> None:
        """What the slot's scored step, which is next, writes log-probabilities of prompts with."""
        out = self._logprobs[key.segments : key.segments + len(targets)]
        self._scores = PromptScores(out, key.decode_rows, targets, self._hopper)

    def forward(self, key: StepKey) -> StepTensors:
        """Head and forward; the result's ``logits`` are set."""
        step = StepTensors(
            kind=key.kind,
            decode_tokens=key.decode_rows,
            decode_meta=self._shared.decode_meta[: key.num_tokens],
            segments=self._segments[: key.segments],
            counts=self._shared.counts,
            tables=list(self._tables),
            page_table=self._tables.page_table,
            row_state=self._tables.row_state,
            sampled=self._shared.sampled[: key.segments],
            max_length=self._spec.max_len,
            score=self._scores if key.scored else None,
            features=key.features,
        )
        staged = self._staged[: key.num_tokens]
        ops.begin_step_(
            step.tables, self._deltas, step.segments, staged, step.decode_meta, step.counts
        )
        self._spec.forward(step)
        self._check_logits(step, key)
        return step

    def sample(self, step: StepTensors, masked: bool) -> None:
        """Masks (of a split step), sampling and publish."""
        assert step.logits is not None
        count, automata = step.segments.shape[0], self._shared.automata
        errors = self._shared.row_errors[:count] if masked else None
        if errors is not None:
            masks, keys = self._masks_of(count), self._mask_keys(count)
            ops.apply_token_mask_(step.logits, masks, keys, step.segments, step.row_state, errors)
        if self._spec.sample is not None:
            self._spec.sample(step)
        else:
            ops.sample_into(
                step.sampled,
                step.logits,
                step.segments,
                step.row_state,
                errors,
                self._hopper,
                step.tables,
                self._logprobs[:count],
                automata,
            )
        if step.value_logits is not None:
            vocab = self._spec.vocab_size
            ops.choose_value_(step.sampled, step.value_logits, step.segments, step.tables, vocab)
        records = self._records[:count]
        ops.publish_(step.tables, records, step.sampled, step.segments, errors, automata)

    def _mask_keys(self, count: int) -> torch.Tensor:
        return self._slot.mask[: self._masks.mask_offset(count)].view(-1, MASK_KEY_COLUMNS)

    def _masks_of(self, count: int) -> torch.Tensor:
        masks = self._slot.mask[self._masks.mask_offset(count) : self._masks.words(count, count)]
        return masks.view(count, self._masks.row_words)

    def _check_logits(self, step: StepTensors, key: StepKey) -> None:
        shape, logits = (key.segments, self._spec.vocab_size), step.logits
        if not isinstance(logits, torch.Tensor):
            wanted = f"a tensor of shape {shape} (segments, vocab_size)"
            raise ConfigError(f"forward() left step.logits {logits!r}; it must assign {wanted}")
        device, stride = step.decode_meta.device, logits.stride(-1) if logits.dim() else 0
        known = logits.dtype in LOGITS_DTYPES
        if logits.shape != shape or not known or logits.device != device or stride != 1:
            raise ConfigError(
                f"forward() assigned step.logits of shape {tuple(logits.shape)}, {logits.dtype}, "
                f"on {logits.device}, last stride {stride}; expected shape {shape} (segments, "
                f"vocab_size), float32, float16 or bfloat16, on {device}, last stride 1"
            )
