"""Block: one layer, attention and MLP behind one another on the residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.adapter import Adapter
from photon_ext.models.layers.attention import Attention, PagedAttention, empty_attention
from photon_ext.models.layers.mlp import Mlp, empty_mlp
from photon_ext.models.layers.projection import Execution, Projection, projections_of, with_adapters


@dataclass(frozen=True)
class Block:
    """A layer: its parameters and its settings. Both parts begin with a norm of the residual."""

    attention: Attention
    mlp: Mlp

    @property
    def first(self) -> Projection:
        """What reads the residual."""
        return self.attention.first

    def projections(self) -> dict[str, Projection]:
        """By name, in the order in which a step goes through them."""
        return projections_of(self.attention) | projections_of(self.mlp)

    def slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a loader fills, by its name in a layer of a checkpoint."""
        for part in (self.attention, self.mlp):
            yield from ((name, slot) for name, slot in part.slots() if slot is not None)

    def with_adapters(self, adapters: Mapping[str, Adapter]) -> Block:
        """The same layer, whose projections have the adapters of their names."""
        return Block(with_adapters(self.attention, adapters), with_adapters(self.mlp, adapters))

    def run(self, execution: Execution, paged: PagedAttention, following: Projection) -> None:
        """From the residual to the residual, which `following` reads next."""
        self.attention.run(execution, paged, self.mlp.first)
        self.mlp.run(execution, following)


def empty_block(config: ModelConfig, index: int, empty: Callable[..., torch.Tensor]) -> Block:
    """The layer of this index; `empty(*shape)` makes tensors."""
    return Block(empty_attention(config, index, empty), empty_mlp(config, index, empty))
