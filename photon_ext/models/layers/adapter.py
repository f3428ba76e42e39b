"""What the adapters (LoRA) of rows add to a projection; models/lora.py owns the memory.

Op by op, `shrink` and `expand` stand before and behind a linear. Between fused linears `link` does
both halves: it ends what the linear before needs and begins what the next one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from photon_ext import ops

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors


@dataclass(frozen=True)
class Adapter:
    """A and B of one projection, of all slots, and where their products are kept.

    Attributes:
        a: [slots, parts * rank, k]: of each part of the projection its own rows.
        b: [slots, n, rank].
        first_rows: outputs of the projection's first part.
        normed: the projection normalizes its input.
        shrunk: what `shrink` leaves to `expand`; all projections use it in turn.
        sums: float32, what one `link` leaves to the next.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_rows: int
    normed: bool
    shrunk: torch.Tensor
    sums: torch.Tensor

    def shrink(self, x: torch.Tensor, step: StepTensors) -> None:
        """The first half, of the linear's input `x` [T, k]; `expand` follows, before the next."""
        shrunk = self._shrunk_of(len(x))
        ops.lora_shrink_into(shrunk, x, self.a, step.decode_meta, step.row_state)

    def expand(self, out: torch.Tensor, step: StepTensors) -> None:
        """The second half: it is added to `out` [T, n], the output of the linear."""
        tables = step.decode_meta, step.row_state
        ops.lora_expand_(out, self._shrunk_of(len(out)), self.b, *tables, self.first_rows)

    def sums_of(self, tokens: int) -> torch.Tensor:
        """What `link` keeps of the input of the linear."""
        shape = ops.lora_link_sums(tokens, *self.a.shape[1:])
        return self.sums[: math.prod(shape)].view(shape)

    def _shrunk_of(self, tokens: int) -> torch.Tensor:
        columns = self.a.shape[1]
        return self.shrunk[: tokens * columns].view(tokens, columns)


def link(
    x: torch.Tensor,
    step: StepTensors,
    ended: Adapter | None,
    begun: Adapter | None,
    eps: float,
    norm: torch.Tensor | None = None,
    act: torch.Tensor | None = None,
) -> None:
    """What adapters do between two fused linears, in one op, bfloat16 alone: they add to `x`, the
    output of the linear `ended`; `act` becomes silu(gate) * up of x; and the linear `begun` is
    begun, whose input is x, to be normalized with `norm` and `eps`, or act.
    """
    before = after = a = b = ended_eps = None
    first_rows = 0
    if ended is not None:
        before, b, first_rows = ended.sums_of(len(x)), ended.b, ended.first_rows
        ended_eps = eps if ended.normed else None
    if begun is not None:
        after, a = begun.sums_of(len(x)), begun.a
    tables = step.decode_meta, step.row_state
    ops.lora_link_(x, *tables, before, b, first_rows, ended_eps, act, after, a, norm, pdl=True)
