"""Projection: a linear of a layer with what comes before and behind it, and how steps run it.

A `Projection` is data. An `Execution` runs the projections of one forward, by the ops of its mode.
All calls of linear ops in models/ stand in this file, and of tokens in fp8 in fp8_execution.py.
Every mode goes through a layer in the same steps:

    begin(projection, x)                x is complete, and the projection reads it next
    project(out, x, projection)         out = projection(x)
    swiglu(act, projection, down)       act = silu(gate) * up of projection(hidden)
    add(projection, x, following)       residual += projection(x), as `following` is to read it

`hidden` is what a projection that normalizes is given: the residual where its op normalizes, else
the buffer where the op before it left the normalized residual.

Adapters of rows are woven in here, too: a mode that fuses ends one projection's and begins the next
one's in one op between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from photon_ext import ops
from photon_ext.models.kernel_plan import ExecutionMode
from photon_ext.models.layers.adapter import Adapter, link
from photon_ext.models.layers.buffers import Activations, Workspaces
from photon_ext.models.layers.weight import empty_weight
from photon_ext.models.projections import ProjectionShape
from photon_ext.runtime.step_features import StepFeatures
from photon_ext.weight import Weight
from photon_ext.weight_format import SCALE_BLOCK, WeightFormat

if TYPE_CHECKING:
    from photon_ext.runtime.step import StepTensors

Part = TypeVar("Part", bound=Any)


@dataclass(frozen=True)
class Projection:
    """A linear with its values.

    Attributes:
        shape: what it is made of, what stands before and what becomes of the product.
        weights: [rows, k], of one or more outputs each, one below the other: modules that are
            stored alike share one.
        bias: [n], or None.
        norm: [k]: the input is RMS-normalized by it; None: it is read as it is.
        adapter: what rows' adapters add; None: it has none.
    """

    shape: ProjectionShape
    weights: tuple[Weight, ...]
    bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    adapter: Adapter | None = None

    @property
    def weight(self) -> Weight:
        """The only one."""
        (weight,) = self.weights
        return weight

    def modules(self) -> Iterator[tuple[str, Weight]]:
        """The weight of each module, by its name in a checkpoint."""
        segments = zip(self.weights, self.shape.segments(), strict=True)
        parts = (part for weight, segment in segments for part in weight.split(segment.rows))
        yield from zip(self.shape.modules, parts, strict=True)

    def slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a loader fills besides the weights, by its name in a checkpoint; but the norm, whose
        name is another's business.
        """
        if self.bias is not None:
            biases = torch.split(self.bias, list(self.shape.rows))
            for module, bias in zip(self.shape.modules, biases, strict=True):
                yield f"{module}.bias", bias

    def operands(self) -> tuple[Weight, torch.Tensor | None]:
        """Weight and bias, as all linear ops take them; of one whose modules are stored alike."""
        return self.weight, self.bias

    def segments(
        self, out: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Weight, torch.Tensor | None]]:
        """Of each weight in turn its columns of `out` [T, n], itself and its bias."""
        if len(self.weights) == 1:
            yield out, self.weights[0], self.bias
            return
        begin = 0
        for weight in self.weights:
            bias = None if self.bias is None else self.bias.narrow(0, begin, weight.n)
            yield out.narrow(1, begin, weight.n), weight, bias
            begin += weight.n

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the product with `x` [T, k] to `residual` [T, n], in a step of any mode."""
        for out, weight, bias in self.segments(residual):
            ops.linear_residual_(out, x, weight, bias)


def empty_projection(
    shape: ProjectionShape, empty: Callable[..., torch.Tensor], weight: Weight | None = None
) -> Projection:
    """One without values, but for `weight` if it is given; `empty(*shape)` makes tensors."""
    weights = (
        empty_weight(sum(segment.rows), shape.k, segment.stored, empty)
        for segment in shape.segments()
    )
    return Projection(
        shape,
        tuple(weights) if weight is None else (weight,),
        empty(shape.n) if shape.bias else None,
        empty(shape.k) if shape.normed else None,
    )


def projections_of(part: object) -> dict[str, Projection]:
    """The fields of a part of a layer that are projections, by name."""
    return {name: one for name, one in vars(part).items() if isinstance(one, Projection)}


def with_adapters(part: Part, adapters: Mapping[str, Adapter]) -> Part:
    """A part of a layer whose projections have the adapters of their names."""
    changed = {
        name: replace(projection, adapter=adapters[name])
        for name, projection in projections_of(part).items()
    }
    return replace(part, **changed)


# --- how a step runs them -------------------------------------------------------------------------


class Execution:
    """The projections of one forward: this class has what its modes share.

    Attributes:
        step, buffers: the step, and the activations of its tokens.
        hidden: [T, H], see above.
        early: kernels let the next one start before they have ended.
    """

    early = False

    def __init__(
        self,
        step: StepTensors,
        buffers: Activations,
        workspaces: Workspaces,
        eps: float,
        counts: torch.Tensor | None,
    ) -> None:
        """`eps`: of all norms; `counts`: int32 on the device, of the tokens that are alive."""
        self.step, self.buffers, self.hidden = step, buffers, buffers.normed
        self._adapted = StepFeatures.LORA in step.features
        self._workspaces, self._eps, self._counts = workspaces, eps, counts

    def begin(self, projection: Projection, x: torch.Tensor) -> None:
        """Of `x`, which no projection has written."""
        if projection.norm is not None:
            ops.rms_norm_into(self.buffers.normed, x, projection.norm, self._eps)

    def project(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        raise NotImplementedError

    def swiglu(self, act: torch.Tensor, projection: Projection, down: Projection) -> None:
        """`down` reads `act` next."""
        raise NotImplementedError

    def add(self, projection: Projection, x: torch.Tensor, following: Projection) -> None:
        """`following` normalizes."""
        raise NotImplementedError

    def _adapter(self, projection: Projection) -> Adapter | None:
        """In a step with adapters, that of the projection."""
        return projection.adapter if self._adapted else None


class Unfused(Execution):
    """Op by op, on every device; a residual add is folded into the norm that follows."""

    def project(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        adapter = self._adapter(projection)
        if adapter is not None:
            adapter.shrink(x, self.step)
        self._multiply(out, x, projection)
        if adapter is not None:
            adapter.expand(out, self.step)

    def swiglu(self, act: torch.Tensor, projection: Projection, down: Projection) -> None:
        self.project(self.buffers.gate_up, self.hidden, projection)
        ops.silu_mul_into(act, self.buffers.gate_up)

    def add(self, projection: Projection, x: torch.Tensor, following: Projection) -> None:
        buffers = self.buffers
        self.project(buffers.projected, x, projection)
        ops.add_rms_norm_into(
            buffers.normed, buffers.residual, buffers.projected, norm_of(following), self._eps
        )

    def _multiply(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        for part, weight, bias in projection.segments(out):
            ops.linear_into(part, x, weight, bias, self._counts)


class TorchProducts(Unfused):
    """Op by op, with torch's matrix products. Weights of few bits are decoded for them, some rows
    at a time.
    """

    def _multiply(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        for part, weight, bias in projection.segments(out):
            self._multiply_one(part, x, weight, bias)

    def _multiply_one(
        self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> None:
        if weight.format is WeightFormat.DENSE:
            _torch_product(out, x, weight.data, bias)
            return
        numbers = self._workspaces.numbers
        assert numbers is not None, "a plan whose steps multiply by torch has room for numbers"
        for begin, rows in _decoded(weight, numbers):
            own = None if bias is None else bias.narrow(0, begin, len(rows))
            _torch_product(out.narrow(1, begin, len(rows)), x, rows, own)


def _decoded(weight: Weight, room: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers of a weight of few bits, as many rows at a time as there is room for, and which
    row is the first of them.
    """
    fit = room.numel() // weight.k
    each = weight.n if weight.n <= fit else fit // SCALE_BLOCK * SCALE_BLOCK
    counts = [min(each, weight.n - begin) for begin in range(0, weight.n, each)]
    for index, some in enumerate(weight.split(counts)):
        rows = room[: some.n * some.k].view(some.n, some.k)
        ops.dequantize_into(rows, some)
        yield index * each, rows


def _torch_product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class Fused(Execution):
    """The Hopper linears, fused with the norm, SwiGLU or residual add at their ends.

    All kernels but chunk attention's start early: none writes a weight, and what else they read
    ahead (counts, decode_meta, page table, old keys and values) was complete when the embedding
    let the first of them start: it waits for the head of the step. Behind a kernel that does
    not let the next one start, one starts when that has ended.
    """

    early = True

    def __init__(self, step: StepTensors, buffers: Activations, *others: Any) -> None:
        super().__init__(step, buffers, *others)
        self.hidden = buffers.residual

    def begin(self, projection: Projection, x: torch.Tensor) -> None:
        self._link(x, None, projection)

    def project(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        self._norm_linear(out, x, projection)
        self._link(out, projection, None)

    def swiglu(self, act: torch.Tensor, projection: Projection, down: Projection) -> None:
        """In one op, or with adapters in two, which give rows without one the same bits."""
        if self._adapter(projection) is not None:
            gate_up = self.buffers.gate_up
            self._norm_linear(gate_up, self.hidden, projection)
            self._link(gate_up, projection, down, act)
            return
        ops.norm_swiglu_into(
            act,
            self.hidden,
            norm_of(projection),
            self._eps,
            *projection.operands(),
            self._counts,
            hopper=True,
            pdl=True,
            workspace=self._workspaces.linear,
        )

    def add(self, projection: Projection, x: torch.Tensor, following: Projection) -> None:
        residual, counts = self.buffers.residual, self._counts
        is_dense = projection.weight.format is WeightFormat.DENSE
        ops.linear_residual_(
            residual,
            x,
            *projection.operands(),
            counts,
            hopper=True,
            pdl=True,
            workspace=None if is_dense else self._workspaces.linear,
        )
        self._link(residual, projection, following)

    def _norm_linear(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        for part, weight, bias in projection.segments(out):
            ops.norm_linear_into(
                part,
                x,
                norm_of(projection),
                self._eps,
                weight,
                bias,
                self._counts,
                hopper=True,
                pdl=True,
                workspace=self._workspaces.linear,
            )

    def _link(
        self,
        x: torch.Tensor,
        ended: Projection | None,
        begun: Projection | None,
        act: torch.Tensor | None = None,
    ) -> None:
        """What adapters do between two projections: `x` is the output of the one, and it, or `act`,
        the input of the other.
        """
        ends = None if ended is None else self._adapter(ended)
        begins = None if begun is None else self._adapter(begun)
        if ends is not None or begins is not None:
            norm = None if begun is None or begins is None else begun.norm
            link(x, self.step, ends, begins, self._eps, norm, act)


class Batch(Execution):
    """The Hopper linears for a batch, which end in SwiGLU or in the next norm. What starts early is
    as in `Fused`; adapters they do not know.
    """

    early = True

    def project(self, out: torch.Tensor, x: torch.Tensor, projection: Projection) -> None:
        for part, weight, bias in projection.segments(out):
            ops.linear_into(part, x, weight, bias, self._counts, hopper=True, pdl=True)

    def swiglu(self, act: torch.Tensor, projection: Projection, down: Projection) -> None:
        ops.swiglu_into(
            act,
            self.hidden,
            *projection.operands(),
            self._counts,
            hopper=True,
            pdl=True,
        )

    def add(self, projection: Projection, x: torch.Tensor, following: Projection) -> None:
        weight, bias = projection.operands()
        ops.linear_norm_into(
            self.buffers.normed,
            self.buffers.residual,
            x,
            weight,
            norm_of(following),
            self._eps,
            bias,
            self._counts,
            hopper=True,
            pdl=True,
            workspace=self._workspaces.batch,
        )


EXECUTIONS: Mapping[ExecutionMode, type[Execution]] = {
    ExecutionMode.FUSED: Fused,
    ExecutionMode.BATCH: Batch,
    ExecutionMode.OWN: Unfused,
    ExecutionMode.TORCH: TorchProducts,
}


def norm_of(projection: Projection) -> torch.Tensor:
    """Of one that normalizes its input."""
    assert projection.norm is not None, f"{projection.shape.modules} have no norm"
    return projection.norm
