"""Mlp: the dense gated MLP of a layer, down(silu(gate(x)) * up(x)) added to the residual.

Another kind (of experts, say) is a class here with the same methods, and a line of `empty_mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.projection import Execution, Projection, empty_projection
from photon_ext.models.projections import layer_projections


@dataclass(frozen=True)
class Mlp:
    """Shazeer, "GLU Variants Improve Transformer", 2020. H hidden, I intermediate.

    Attributes:
        gate_up: [2 I, H]: gate rows, then up rows; it normalizes the residual.
        down: [H, I].
    """

    gate_up: Projection
    down: Projection

    @property
    def first(self) -> Projection:
        """What reads the residual."""
        return self.gate_up

    def slots(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What a loader fills, by its name in a layer of a checkpoint; None: there is none."""
        yield "post_attention_layernorm.weight", self.gate_up.norm
        yield from self.gate_up.slots()
        yield from self.down.slots()

    def run(self, execution: Execution, following: Projection) -> None:
        """Adds to the residual, which `following` reads next."""
        act = execution.buffers.act
        execution.swiglu(act, self.gate_up, self.down)
        execution.add(self.down, act, following)


def empty_mlp(config: ModelConfig, index: int, empty: Callable[..., torch.Tensor]) -> Mlp:
    """That of the layer of this index; `empty(*shape)` makes tensors."""
    shapes = layer_projections(config, index)
    return Mlp(*(empty_projection(shapes[name], empty) for name in ("gate_up", "down")))
