"""Adapters in slots of fixed addresses: low-rank updates of all linears of a decoder.

A slot's matrices lie one behind the other in one run of memory, so that an adapter is loaded by one
copy. Of a projection of several modules, those of its modules lie side by side: the A of q, k and v
one below the other, so that one op shrinks, and their B likewise, each row with the rank of its own
module. What a forward does with them is in layers/adapter.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from photon_ext import ops
from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.adapter import Adapter
from photon_ext.models.projections import ProjectionShape, layer_projections

RANK_MULTIPLE = 8  # ranks are padded with zeros to whole vectors


class Pair(NamedTuple):
    """A [..., parts * rank, columns] and B [..., rows, rank]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class LoraShape:
    """What a slot holds: for each projection of a layer a `Pair`, of adapters up to `most_rank`."""

    config: ModelConfig
    most_rank: int

    @property
    def rank(self) -> int:
        """Of the slot, padding included."""
        return -(-self.most_rank // RANK_MULTIPLE) * RANK_MULTIPLE

    @cached_property
    def projections(self) -> dict[str, ProjectionShape]:
        """Those of a layer. All layers have the same."""
        return layer_projections(self.config)

    @property
    def words(self) -> int:
        """Numbers of one slot."""
        return self.config.layers * sum(
            self.rank * (len(one.rows) * one.k + one.n) for one in self.projections.values()
        )

    @property
    def most_columns(self) -> int:
        """Values that A makes of a token, at most."""
        return self.rank * max(len(one.rows) for one in self.projections.values())

    def sum_words(self, normed: bool) -> int:
        """float32 numbers that `link` keeps of a token, at most, of projections that normalize, or
        of the others.
        """
        return max(
            math.prod(ops.lora_link_sums(1, self.rank * len(one.rows), one.k))
            for one in self.projections.values()
            if one.normed == normed
        )

    def nbytes(self, slots: int, max_tokens: int, dtype: torch.dtype) -> int:
        """Memory of `slots` slots, in steps of at most `max_tokens` tokens."""
        numbers = slots * self.words + max_tokens * self.most_columns
        sums = sum(map(self.sum_words, (True, False))) if dtype is torch.bfloat16 else 0
        return dtype.itemsize * numbers + 4 * max_tokens * sums

    def views(self, memory: torch.Tensor) -> list[Mapping[str, Pair]]:
        """The matrices in `memory` [..., words], by layer and projection."""
        layers: list[Mapping[str, Pair]] = []
        begin, rank = 0, self.rank
        for _ in range(self.config.layers):
            pairs = {}
            for name, projection in self.projections.items():
                rows, k, n = rank * len(projection.rows), projection.k, projection.n
                middle = begin + rows * k
                end = middle + n * rank
                pairs[name] = Pair(
                    memory[..., begin:middle].unflatten(-1, (rows, k)),
                    memory[..., middle:end].unflatten(-1, (n, rank)),
                )
                begin = end
            layers.append(pairs)
        return layers


class LoraCopy:
    """An adapter on its way into a slot, which may be used when the copy is done."""

    def __init__(self, event: torch.cuda.Event | None, source: torch.Tensor) -> None:
        self._event = event
        self._source: torch.Tensor | None = source  # the copy reads it

    def done(self) -> bool:
        """Whether `wait` would return at once; never blocks."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks until it is done."""
        if self._event is not None:
            self._event.synchronize()
        self._source = None


class LoraSlots:
    """The device memory of slots 1 to `slots`.

    Attributes:
        shape: of each slot.
        count: how many there are, besides slot 0, which is none.
        layers: for each layer what its projections add, by name.
        nbytes: device memory of all.
    """

    def __init__(
        self,
        shape: LoraShape,
        slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates it, for steps of at most `max_tokens` tokens."""
        self.shape, self.count = shape, slots
        self.nbytes = shape.nbytes(slots, max_tokens, dtype)
        self._memory = torch.zeros(slots, shape.words, dtype=dtype, device=device)
        self.layers = self._adapters(max_tokens)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize(device)  # the zeros were written on another stream

    def _adapters(self, max_tokens: int) -> list[dict[str, Adapter]]:
        shape, like = self.shape, self._memory
        shrunk = like.new_zeros(max_tokens * shape.most_columns)
        # in turns: projections that normalize their input follow others
        tokens = max_tokens if like.dtype is torch.bfloat16 else 0
        sums = {
            normed: like.new_zeros(tokens * shape.sum_words(normed), dtype=torch.float32)
            for normed in (True, False)
        }

        def adapter(projection: ProjectionShape, pair: Pair) -> Adapter:
            normed = projection.normed
            return Adapter(*pair, projection.rows[0], normed, shrunk, sums[normed])

        return [
            {name: adapter(shape.projections[name], pair) for name, pair in pairs.items()}
            for pairs in shape.views(like)
        ]

    def read(self, path: str | Path) -> torch.Tensor:
        """An adapter of PEFT, [words] on the host. Raises ModelError."""
        from photon_ext.models.loading.lora_file import read_lora  # only here is safetensors needed

        return read_lora(path, self.shape, self._memory.dtype, pin=self._stream is not None)

    def load(self, slot: int, weights: torch.Tensor) -> LoraCopy:
        """Enqueues the copy of an adapter, [words] on the host, into a slot that no step in flight
        uses, on a stream of its own; on a CPU it is done on return.
        """
        if self._stream is None:
            self._memory[slot - 1].copy_(weights)
            return LoraCopy(None, weights)
        with torch.cuda.stream(self._stream):
            self._memory[slot - 1].copy_(weights, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return LoraCopy(event, weights)
