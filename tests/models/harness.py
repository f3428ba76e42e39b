"""Drives a Decoder without a runtime: hand-made steps over a shuffled page table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_ext import ops
from photon_ext.checks import KvDtype
from photon_ext.layout import NO_PAGE, ROW_COLUMNS, RowColumn
from photon_ext.models.config import ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import KernelPlan, plan_for
from photon_ext.models.lora import LoraSlots
from photon_ext.models.weights import DecoderWeights
from photon_ext.runtime.step import StepKind, StepTensors
from photon_ext.runtime.step_features import features_with


class Chunk(NamedTuple):
    """Consecutive tokens of a row, from `position` on."""

    row: int
    position: int
    tokens: list[int]


DEAD = Chunk(0, -1, [0])


def _last_live(decodes: list[Chunk]) -> int:
    """1 + the last decode token that is not dead."""
    return max((i + 1 for i, chunk in enumerate(decodes) if chunk is not DEAD), default=0)


def _indexable(cache: torch.Tensor) -> torch.Tensor:
    """torch does not index fp8 on every device."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


class Harness:
    """A decoder of `rows` rows, each with `max_len` positions over pages in random order; row 0
    is padding.

    Attributes:
        slots: the adapter of each row that has one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_len: int = 64,
        page_size: int = 4,
        exact: bool = False,
        hopper: bool = False,
        rows: int = 4,
        max_step_tokens: int = 64,
        lora: LoraSlots | None = None,
        plan: KernelPlan | None = None,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        self.slots: dict[int, int] = {}
        self.device = weights.device
        pages_per_row = -(-max_len // page_size)
        num_pages = 1 + rows * pages_per_row
        entries, segments = max(max_step_tokens, rows), max(rows, min(2 * rows, 64))
        sizes = (entries, segments, max_len, page_size, num_pages)
        plan = plan or plan_for(config, weights, "hopper" if hopper else "portable", exact)
        self.decoder = Decoder(config, weights, *sizes, plan, lora, kv_dtype=kv_dtype)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(7))
        self.page_table = torch.full((rows + 1, pages_per_row), NO_PAGE, dtype=torch.int32)
        self.page_table[1:] = order.view(rows, pages_per_row)
        self.page_table = self.page_table.to(self.device)

    def step(self, kind: StepKind, chunks: list[Chunk], padding: int = 0) -> torch.Tensor:
        """Runs `make_step` and returns a copy of the logits of the last token of every chunk,
        [len(chunks), vocab].
        """
        step = self.make_step(kind, chunks, padding)
        self.decoder.forward(step)
        assert step.logits is not None
        return step.logits[: len(chunks)].clone()

    def make_step(
        self, kind: StepKind, chunks: list[Chunk], padding: int = 0, decodes: int = 0
    ) -> StepTensors:
        """A step of these chunks; `padding` dead tokens and segments follow the live ones.

        In a mixed step the first `decodes` chunks are decode tokens, DEAD ones among them.
        """
        entries = [
            (token, chunk.position + i, chunk.row)
            for chunk in chunks
            for i, token in enumerate(chunk.tokens)
        ]
        live, total = len(entries), len(entries) + padding
        columns = (
            torch.tensor(entries + [(0, -1, 0)] * padding, dtype=torch.int32)
            .t()
            .contiguous()
            .to(self.device)
        )
        decode_meta = torch.empty(total, 4, dtype=torch.int32, device=self.device)
        ops.decode_meta_set_(decode_meta, *columns.unbind())
        segments = torch.zeros(len(chunks) + padding, 4, dtype=torch.int32)
        first = 0
        for index, chunk in enumerate(chunks):
            segments[index] = torch.tensor([chunk.row, first, len(chunk.tokens), 1])
            first += len(chunk.tokens)
        carried = live if kind is StepKind.DECODE else _last_live(chunks[:decodes])
        row_state = torch.zeros(
            len(self.page_table), ROW_COLUMNS, dtype=torch.int32, device=self.device
        )
        for row, slot in self.slots.items():
            row_state[row, RowColumn.LORA_SLOT] = slot
        return StepTensors(
            kind=kind,
            decode_tokens=total if kind is StepKind.DECODE else decodes,
            decode_meta=decode_meta,
            segments=segments.to(self.device),
            counts=torch.tensor(
                [carried, live, len(chunks)], dtype=torch.int32, device=self.device
            ),
            tables=[row_state, self.page_table, torch.zeros_like(self.page_table)],
            page_table=self.page_table,
            row_state=row_state,
            sampled=torch.zeros(len(segments), dtype=torch.int32, device=self.device),
            max_length=self.page_table.shape[1] * self.decoder.page_size,
            features=features_with(any(self.slots.values()), 0),
        )

    def mixed(self, decodes: list[Chunk], chunks: list[Chunk], padding: int = 0) -> torch.Tensor:
        """Logits of the decode tokens, of which some may be DEAD, and of the chunks."""
        step = self.make_step(StepKind.MIXED, [*decodes, *chunks], padding, len(decodes))
        self.decoder.forward(step)
        assert step.logits is not None
        return step.logits[: len(decodes) + len(chunks)].clone()

    def prefill(self, chunks: list[Chunk], padding: int = 0) -> torch.Tensor:
        return self.step(StepKind.PREFILL, chunks, padding)

    def decode(
        self, rows: list[int], positions: list[int], tokens: list[int], padding: int = 0
    ) -> torch.Tensor:
        chunks = [
            Chunk(row, position, [token])
            for row, position, token in zip(rows, positions, tokens, strict=True)
        ]
        return self.step(StepKind.DECODE, chunks, padding)

    def caches(self) -> list[torch.Tensor]:
        """Keys and values of all layers, whole; what was never written may be anything."""
        pool = self.decoder._kv
        return [*pool.keys, *pool.values]

    def context(self, row: int, length: int) -> torch.Tensor:
        """Keys and values of a row's first positions, [2 * layers, length, kv heads, head_dim]."""
        positions = torch.arange(length, device=self.device)
        page_size = self.decoder.page_size
        pages = self.page_table[row].long()[positions // page_size]
        places = pages, positions % page_size
        return torch.stack([_indexable(cache)[places] for cache in self.caches()])

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt, all prompts in one batch on rows 1, 2, ..."""
        rows = list(range(1, len(prompts) + 1))
        logits = self.prefill(
            [Chunk(row, 0, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        )
        outputs: list[list[int]] = [[] for _ in prompts]
        for index in range(count):
            tokens = logits.argmax(-1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            if index + 1 < count:
                logits = self.decode(rows, [len(prompt) + index for prompt in prompts], tokens)
        return outputs
