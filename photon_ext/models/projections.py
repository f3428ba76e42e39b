"""ProjectionShape: a linear of a layer without its values. Host data only, no torch.

What the linears of a layer are is said in `layer_projections` alone. Their tensors, the buffers of
activations, the slots of adapters, and what a kernel plan and `photon-ext info --plan` ask of each
follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from photon_ext.models.config import ModelConfig
from photon_ext.models.quantization import EMBEDDING, StoredFormat


class Epilogue(Enum):
    """What becomes of a product. In how many ops, and whether the next norm is part of the last of
    them, is up to the execution mode.
    """

    STORE = "stored"
    SWIGLU = "silu(gate) * up of it is stored; gate rows come first"
    ADD = "added to the residual"


# The op that ends in it, with the norm in front where there is one, in the execution mode FUSED,
# and in the mode BATCH, where the norm stands behind
FUSED_OPS = {
    Epilogue.STORE: "norm_linear_into",
    Epilogue.SWIGLU: "norm_swiglu_into",
    Epilogue.ADD: "linear_residual_",
}
BATCH_OPS = {
    Epilogue.STORE: "linear_into",
    Epilogue.SWIGLU: "swiglu_into",
    Epilogue.ADD: "linear_norm_into",
}

HEAD = "lm_head"
# As people call those of a layer
TITLES = {"qkv": "q, k, v", "o": "o", "gate_up": "gate, up", "down": "down"}


class Segment(NamedTuple):
    """Modules that follow one another and are stored alike.

    Attributes:
        rows: outputs of each.
        stored: as in ProjectionShape.
    """

    rows: tuple[int, ...]
    stored: StoredFormat | None


@dataclass(frozen=True)
class ProjectionShape:
    """A linear, made of one or more modules of a checkpoint, one below the other.

    Attributes:
        modules: their names; in a layer they begin behind "model.layers.0.".
        rows: outputs of each.
        k: inputs.
        bias: the modules have one.
        normed: the input is RMS-normalized first.
        epilogue: what becomes of the product.
        stored: how the weight of each module is stored; None: in the dtype of the model. Without
            them all are.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    k: int
    bias: bool = False
    normed: bool = False
    epilogue: Epilogue = Epilogue.STORE
    stored: tuple[StoredFormat | None, ...] = ()

    @property
    def n(self) -> int:
        """Outputs of all modules."""
        return sum(self.rows)

    @property
    def is_head(self) -> bool:
        return self.modules == (HEAD,)

    @property
    def is_dense(self) -> bool:
        """Whether all of its weight has the dtype of the model."""
        return not any(self.stored)

    def segments(self) -> list[Segment]:
        """Its modules in order: those of one are one matrix in memory."""
        stored = self.stored or (None,) * len(self.rows)
        found: list[Segment] = []
        for rows, one in zip(self.rows, stored, strict=True):
            last = found[-1] if found else None
            if last and last.stored == one and (one is None or one.joins(sum(last.rows))):
                found[-1] = Segment((*last.rows, rows), one)
            else:
                found.append(Segment((rows,), one))
        return found


def layer_projections(config: ModelConfig, index: int = 0) -> dict[str, ProjectionShape]:
    """Those of a layer, in the order in which a step goes through them. All layers are alike, but
    that the weights of some may be stored otherwise.
    """
    q, kv, width = config.q_size, config.kv_size, config.intermediate
    heads = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    halves = {"gate_proj": width, "up_proj": width}
    if config.fused_modules:
        heads, halves = {"qkv_proj": config.qkv_size}, {"gate_up_proj": 2 * width}
    o, down = {"o_proj": config.hidden}, {"down_proj": config.hidden}
    shapes = {
        "qkv": _shape("self_attn", heads, config.hidden, config.qkv_bias),
        "o": _shape("self_attn", o, q, config.o_bias, Epilogue.ADD),
        "gate_up": _shape("mlp", halves, config.hidden, config.mlp_bias, Epilogue.SWIGLU),
        "down": _shape("mlp", down, width, config.mlp_bias, Epilogue.ADD),
    }
    return {name: _stored(config, f"model.layers.{index}.", one) for name, one in shapes.items()}


def _shape(
    part: str, rows: Mapping[str, int], k: int, bias: bool, epilogue: Epilogue = Epilogue.STORE
) -> ProjectionShape:
    """What adds to the residual reads what the layer has made; the others normalize it."""
    modules = tuple(f"{part}.{name}" for name in rows)
    normed = epilogue is not Epilogue.ADD
    return ProjectionShape(modules, tuple(rows.values()), k, bias, normed, epilogue)


def _stored(config: ModelConfig, prefix: str, shape: ProjectionShape) -> ProjectionShape:
    """The same as the checkpoint stores it; `prefix`: what stands before its modules there."""
    found = config.quantization
    if found is None:
        return shape
    return replace(shape, stored=tuple(found.of(prefix + module) for module in shape.modules))


def head_projection(config: ModelConfig) -> ProjectionShape:
    """That of the head, which normalizes the last layer's output. One that is the embedding is
    stored as that is.
    """
    head = ProjectionShape((HEAD,), (config.vocab,), config.hidden, normed=True)
    if config.tied_embeddings:
        return replace(head, stored=(embedding_format(config),))
    return _stored(config, "", head)


def embedding_format(config: ModelConfig) -> StoredFormat | None:
    """How the table of embeddings is stored; None: in the dtype of the model."""
    return None if config.quantization is None else config.quantization.of(EMBEDDING)
