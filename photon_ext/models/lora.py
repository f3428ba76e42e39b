"""Adapters in slots of fixed addresses: low-rank updates of all linears of a decoder.

A slot's matrices lie one behind the other in one run of memory, so that an adapter is loaded by one
copy. Of a fused projection, those of its parts lie side by side: the A of q, k and v one below the
other, so that one op shrinks, and their B likewise, each row with the rank of its own part.

Op by op, `shrink` and `expand` stand before and behind each linear. Between fused linears `link`
does both halves: it ends what the linear before needs and begins what the next one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from photon_ext import ops
from photon_ext.models.config import ModelConfig

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors

Place: TypeAlias = tuple[int, str]
"""A layer, and one of its linears by its name in LayerWeights."""
RANK_MULTIPLE = 8  # ranks are padded with zeros to whole vectors


class FusedLinear(NamedTuple):
    """A projection as the decoder has it: the modules of a layer that it holds, as Hugging Face
    names them, the rows of each, the columns of all, and whether its input is to be normalized.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    normed: bool


class Pair(NamedTuple):
    """A [..., parts * rank, columns] and B [..., rows, rank]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class LoraShape:
    """What a slot holds: for each layer and linear a `Pair`, of adapters up to `most_rank`."""

    config: ModelConfig
    most_rank: int

    @property
    def rank(self) -> int:
        """Of the slot, padding included."""
        return -(-self.most_rank // RANK_MULTIPLE) * RANK_MULTIPLE

    @cached_property
    def linears(self) -> dict[str, FusedLinear]:
        """By the names of LayerWeights."""
        config = self.config
        hidden, kv, wide = config.hidden, config.kv_size, config.intermediate
        attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
        return {
            "qkv": FusedLinear(attention, (config.q_size, kv, kv), hidden, True),
            "o": FusedLinear(("self_attn.o_proj",), (hidden,), config.q_size, False),
            "gate_up": FusedLinear(("mlp.gate_proj", "mlp.up_proj"), (wide, wide), hidden, True),
            "down": FusedLinear(("mlp.down_proj",), (hidden,), wide, False),
        }

    @property
    def words(self) -> int:
        """Numbers of one slot."""
        rank = self.rank
        return self.config.layers * sum(
            rank * (len(one.rows) * one.columns + sum(one.rows)) for one in self.linears.values()
        )

    @property
    def most_columns(self) -> int:
        """Values that A makes of a token, at most."""
        return self.rank * max(len(linear.rows) for linear in self.linears.values())

    def sums(self, name: str, tokens: int) -> tuple[int, int, int]:
        """The shape of what `LoraSlots.link` keeps of the input of a linear."""
        linear = self.linears[name]
        return ops.lora_link_sums(tokens, self.rank * len(linear.rows), linear.columns)

    def sum_words(self, normed: bool) -> int:
        """float32 numbers of it of a token, at most, of linears that normalize or the others."""
        names = [name for name, linear in self.linears.items() if linear.normed == normed]
        return max(math.prod(self.sums(name, 1)) for name in names)

    def views(self, memory: torch.Tensor) -> list[Mapping[str, Pair]]:
        """The matrices in `memory` [..., words], by layer and linear."""
        layers: list[Mapping[str, Pair]] = []
        begin, rank = 0, self.rank
        for _ in range(self.config.layers):
            pairs = {}
            for name, linear in self.linears.items():
                parts, rows = len(linear.rows), sum(linear.rows)
                middle = begin + parts * rank * linear.columns
                end = middle + rows * rank
                pairs[name] = Pair(
                    memory[..., begin:middle].unflatten(-1, (parts * rank, linear.columns)),
                    memory[..., middle:end].unflatten(-1, (rows, rank)),
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
    """The device memory of slots 1 to `slots`, and what a forward does with it.

    Attributes:
        shape: of each slot.
        count: how many there are, besides slot 0, which is none.
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
        self._memory = torch.zeros(slots, shape.words, dtype=dtype, device=device)
        self._layers = shape.views(self._memory)
        self._shrunk = torch.zeros(max_tokens * shape.most_columns, dtype=dtype, device=device)
        # in turns: linears that normalize their input follow others
        tokens = max_tokens if dtype is torch.bfloat16 else 0
        self._sums = {
            normed: torch.zeros(tokens * shape.sum_words(normed), device=device)
            for normed in (True, False)
        }
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.nbytes = self._memory.nbytes + self._shrunk.nbytes
        self.nbytes += sum(sums.nbytes for sums in self._sums.values())
        if self._stream is not None:
            torch.cuda.synchronize(device)  # the zeros were written on another stream

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

    def shrink(
        self,
        x: torch.Tensor,
        layer: int,
        name: str,
        step: StepTensors,
    ) -> None:
        """The first half of what adapters add to a linear of `x` [T, columns]: `expand` follows,
        before the next of them.
        """
        ops.lora_shrink_into(
            self._shrunk_of(len(x), layer, name),
            x,
            self._layers[layer][name].a,
            step.decode_meta,
            step.row_state,
        )

    def expand(self, out: torch.Tensor, layer: int, name: str, step: StepTensors) -> None:
        """The second half: it is added to `out`, [T, rows], the output of the linear."""
        ops.lora_expand_(
            out,
            self._shrunk_of(len(out), layer, name),
            self._layers[layer][name].b,
            step.decode_meta,
            step.row_state,
            self.shape.linears[name].rows[0],
        )

    def link(
        self,
        x: torch.Tensor,
        step: StepTensors,
        ended: Place | None,
        begun: Place | None,
        norm: torch.Tensor | None = None,
        act: torch.Tensor | None = None,
    ) -> None:
        """What adapters do between two fused linears, in one op, bfloat16 alone: they add to `x`,
        the output of the linear `ended`; `act` becomes silu(gate) * up of x; and the linear `begun`
        is begun, whose input is x, to be normalized with `norm`, or act.
        """
        before = after = a = b = eps = None
        first_rows = 0
        if ended is not None:
            linear, pair = self._at(ended)
            before, b, first_rows = self._sums_of(len(x), ended), pair.b, linear.rows[0]
            eps = self.shape.config.rms_eps if linear.normed else None
        if begun is not None:
            after, a = self._sums_of(len(x), begun), self._at(begun)[1].a
        tables = step.decode_meta, step.row_state
        ops.lora_link_(x, *tables, before, b, first_rows, eps, act, after, a, norm, pdl=True)

    def _at(self, place: Place) -> tuple[FusedLinear, Pair]:
        layer, name = place
        return self.shape.linears[name], self._layers[layer][name]

    def _sums_of(self, tokens: int, place: Place) -> torch.Tensor:
        shape = self.shape.sums(place[1], tokens)
        return self._sums[self._at(place)[0].normed][: math.prod(shape)].view(shape)

    def _shrunk_of(self, tokens: int, layer: int, name: str) -> torch.Tensor:
        columns = self._layers[layer][name].a.shape[1]
        return self._shrunk[: tokens * columns].view(tokens, columns)
