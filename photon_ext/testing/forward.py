"""The toy model as a pipeline's forward: it writes each token to its row's pages, and computes the
logits from what it reads back through the page table.
"""

from __future__ import annotations

import torch

from photon_ext.layout import Meta, SegmentFlag
from photon_ext.runtime.ports import RuntimePort
from photon_ext.runtime.step import StepTensors
from photon_ext.runtime.step_features import StepFeatures
from photon_ext.testing.adapters import SimAdapters
from photon_ext.testing.errors import SimPoison
from photon_ext.testing.model import hashed_logits
from photon_ext.testing.poison import POISON, poison, words_of
from photon_ext.testing.runtime import SimRuntime


class ToyForward:
    """A forward whose tokens are those of ``ToyModel.generate``, on any CPU runtime that runs it
    eagerly: the simulated device always does, ``Runtime`` with ``graph=False``.

    Args:
        runtime: whose pages and positions it uses; a SimRuntime watches its pages.
        vocab_size: that of the Pipeline.
        num_pages: its pages, numbers that nobody has included; None is enough for every row.
        seed, decode_mark: those of the ToyModel.
        adapters: those that rows may have.
    """

    def __init__(
        self,
        runtime: RuntimePort,
        vocab_size: int = 32,
        num_pages: int | None = None,
        seed: int = 0,
        decode_mark: int = 0,
        adapters: SimAdapters | None = None,
    ) -> None:
        table = runtime.table
        pages = table.rows * table.pages_per_row if num_pages is None else num_pages
        self._kv = torch.empty(pages, runtime.page_size, dtype=torch.int32)
        self._vocab_size = vocab_size
        self._seed = seed
        self._decode_mark = decode_mark
        self._adapters = adapters
        self._logits: dict[int, torch.Tensor] = {}
        if isinstance(runtime, SimRuntime):
            runtime.watch_pages(self._kv)
        else:
            poison(self._kv)

    def __call__(self, step: StepTensors) -> None:
        """See StepTensors: writes the step's tokens, and assigns ``step.logits``."""
        segments = step.segments.shape[0]
        if segments not in self._logits:
            self._logits[segments] = torch.empty(segments, self._vocab_size)
        step.logits = self._logits[segments]
        meta = step.decode_meta
        if self._decode_mark:
            meta = meta.clone()
            meta[: step.decode_tokens, Meta.TOKEN] += self._decode_mark
        if StepFeatures.LORA in step.features:
            assert self._adapters is not None
            meta = meta.clone()
            meta[:, Meta.TOKEN] += self._adapters.marks(step)
        _toy_forward(step.logits, self._kv, meta, step.segments, step.page_table, self._seed)


def _run_toy_forward(
    logits: torch.Tensor,
    kv: torch.Tensor,
    decode_meta: torch.Tensor,
    segments: torch.Tensor,
    page_table: torch.Tensor,
    seed: int,
) -> None:
    meta, pages = decode_meta.tolist(), page_table.tolist()
    cells, (num_pages, page_size) = words_of(kv), kv.shape
    for token, position, length, row in meta:
        if length:
            page = _page(pages[row], position // page_size, row, num_pages)
            cells[page * page_size + position % page_size] = token
    rows = words_of(logits.view(torch.int32)).cast("B").cast("f")
    vocab_size = logits.shape[1]
    for index, (row, first, count, flags) in enumerate(segments.tolist()):
        last = first + count - 1
        if flags & SegmentFlag.SAMPLE and 0 <= last < len(meta) and meta[last][2]:
            tokens: list[int] = []
            for start in range(0, meta[last][2], page_size):
                page = _page(pages[row], start // page_size, row, num_pages)
                count = min(page_size, meta[last][2] - start)
                tokens += cells[page * page_size : page * page_size + count].tolist()
            _check(tokens, row)
            rows[index * vocab_size : (index + 1) * vocab_size] = memoryview(
                hashed_logits(tokens, vocab_size, seed)
            )


def _page(pages: list[int], index: int, row: int, num_pages: int) -> int:
    if not (index < len(pages) and 0 <= pages[index] < num_pages):
        raise SimPoison(
            f"row {row} has no page {index} of the forward's {num_pages}; its page table holds "
            f"{pages}"
        )
    return pages[index]


def _check(tokens: list[int], row: int) -> None:
    if POISON in tokens:
        raise SimPoison(
            f"KV of row {row} at position {tokens.index(POISON)} was read, and it was released or "
            "never written"
        )


_library = torch.library.Library("photon_ext_testing", "DEF")
_library.define(
    "toy_forward_(Tensor(a!) logits, Tensor(b!) kv, Tensor decode_meta, Tensor segments, "
    "Tensor page_table, int seed) -> ()"
)
_library.impl("toy_forward_", _run_toy_forward, "CPU")
# an op, so that the simulated device sees what it reads and writes
_toy_forward = torch.ops.photon_ext_testing.toy_forward_.default
