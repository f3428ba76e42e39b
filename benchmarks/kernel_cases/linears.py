"""The projections of a layer and of the lm head: alone, and fused with the norm before or the
residual after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.replay import Run
from benchmarks.kernel_cases.case import (
    Baseline,
    Case,
    Lazy,
    Plan,
    Setting,
    bind,
    normal,
    unwritten,
    verify_call,
)
from photon_ext.models.config import ModelConfig

WAYS = ("portable", "hopper")


class Projection(NamedTuple):
    """A weight [n, k] of a model, and the fused ops that read it in a decode step."""

    what: str
    n: int
    k: int
    fused: tuple[str, ...]


def projections(config: ModelConfig) -> list[Projection]:
    """Every weight matrix of a layer, and the lm head."""
    return [
        Projection("qkv", config.qkv_size, config.hidden, ("norm_linear_into",)),
        Projection("o", config.hidden, config.q_size, ("linear_residual_",)),
        Projection("gate_up", 2 * config.intermediate, config.hidden, ("norm_swiglu_into",)),
        Projection("down", config.hidden, config.intermediate, ("linear_residual_",)),
        Projection("lm_head", config.vocab, config.hidden, ("norm_linear_into",)),
    ]


def linear_groups(
    config: ModelConfig, setting: Setting, batches: list[int]
) -> Iterator[list[Plan]]:
    """One group per weight matrix, whose cases share its copies."""
    for projection in projections(config):
        weights = Lazy(partial(_weights, setting, projection))
        memory = setting.rotation.copies(_weight_bytes(setting, projection)) * _weight_bytes(
            setting, projection
        )
        plans = []
        for batch in batches:
            for op in ("linear_into", *projection.fused):
                for way in ("plain",) if op == "linear_into" else WAYS:
                    make = partial(_MAKERS[op], config, setting, projection, weights, batch, way)
                    plans.append(Plan((op,), projection.what, {"batch": batch}, way, make, memory))
            if batch == 1:
                make = partial(_gemv, config, setting, projection, weights)
                plans.append(
                    Plan(("gemv_into",), projection.what, {"batch": 1}, "plain", make, memory)
                )
        yield plans
    yield [
        Plan(
            ("fused_mlp_into",),
            "mlp",
            {"batch": batch},
            "plain",
            partial(_mlp, config, setting, batch),
            1 << 30,
        )
        for batch in batches
    ]


def _weight_bytes(setting: Setting, projection: Projection) -> int:
    return projection.n * projection.k * setting.dtype.itemsize


def _weights(setting: Setting, projection: Projection) -> torch.Tensor:
    """[copies, n, k]; outputs are about as large as inputs."""
    copies = setting.rotation.copies(_weight_bytes(setting, projection))
    return normal(setting, copies, projection.n, projection.k, deviation=projection.k**-0.5)


def _case(
    setting: Setting,
    projection: Projection,
    runs: list[Run],
    activations: tuple[torch.Tensor, ...],
    verify: Callable[[], float],
    baseline: Callable[[], Baseline],
) -> Case:
    weight_bytes = _weight_bytes(setting, projection)
    nbytes = weight_bytes + sum(tensor.nbytes for tensor in activations)
    return Case(runs, nbytes, verify, baseline, setting.rotation.cold(weight_bytes))


def _linear(
    config: ModelConfig,
    setting: Setting,
    projection: Projection,
    weights: Lazy,
    batch: int,
    way: str,
) -> Case:
    x, out = normal(setting, batch, projection.k), unwritten(setting, batch, projection.n)
    runs = [bind("linear_into", out, x, weight, way=way) for weight in weights()]

    def baseline() -> Baseline:
        return Baseline(
            "torch.mm", [partial(torch.mm, x, weight.t(), out=out) for weight in weights()]
        )

    verify = partial(verify_call, "linear_into", (out, x, weights()[0]), (0,), way)
    return _case(setting, projection, runs, (x, out), verify, baseline)


def _gemv(config: ModelConfig, setting: Setting, projection: Projection, weights: Lazy) -> Case:
    x, out = normal(setting, projection.k), unwritten(setting, projection.n)
    runs = [bind("gemv_into", out, x, weight) for weight in weights()]

    def baseline() -> Baseline:
        return Baseline("torch.mv", [partial(torch.mv, weight, x, out=out) for weight in weights()])

    verify = partial(verify_call, "gemv_into", (out, x, weights()[0]), (0,), "plain")
    return _case(setting, projection, runs, (x, out), verify, baseline)


def _mlp(config: ModelConfig, setting: Setting, batch: int) -> Case:
    """Both matrices of a layer's MLP, copied together."""
    _, _, gate_up, down, _ = projections(config)
    nbytes = _weight_bytes(setting, gate_up) + _weight_bytes(setting, down)
    copies = setting.rotation.copies(nbytes)
    pairs = [
        (
            normal(setting, gate_up.n, gate_up.k, deviation=gate_up.k**-0.5),
            normal(setting, down.n, down.k, deviation=down.k**-0.5),
        )
        for _ in range(copies)
    ]
    x, act = normal(setting, batch, config.hidden), unwritten(setting, batch, config.intermediate)
    out = torch.empty_like(x)
    runs = [bind("fused_mlp_into", out, act, x, *pair) for pair in pairs]

    def composed(first: torch.Tensor, second: torch.Tensor) -> None:
        gate, up = torch.mm(x, first.t()).chunk(2, dim=-1)
        torch.mm(torch.mul(F.silu(gate), up, out=act), second.t(), out=out)

    def baseline() -> Baseline:
        return Baseline(
            "torch.mm, F.silu, torch.mul, torch.mm", [partial(composed, *pair) for pair in pairs]
        )

    verify = partial(verify_call, "fused_mlp_into", (out, act, x, *pairs[0]), (0, 1), "plain")
    return Case(
        runs,
        nbytes + x.nbytes + out.nbytes,
        verify,
        baseline,
        setting.rotation.cold(nbytes),
        dependencies=2,
    )


def _norm_linear(
    config: ModelConfig,
    setting: Setting,
    projection: Projection,
    weights: Lazy,
    batch: int,
    way: str,
) -> Case:
    x, gain, eps = (
        normal(setting, batch, projection.k),
        1 + normal(setting, projection.k, deviation=0.1),
        config.rms_eps,
    )
    out = unwritten(setting, batch, projection.n)
    runs = [bind("norm_linear_into", out, x, gain, eps, weight, way=way) for weight in weights()]

    def composed(weight: torch.Tensor) -> None:
        torch.mm(F.rms_norm(x, (projection.k,), gain, eps), weight.t(), out=out)

    def baseline() -> Baseline:
        return Baseline("F.rms_norm, torch.mm", [partial(composed, weight) for weight in weights()])

    verify = partial(verify_call, "norm_linear_into", (out, x, gain, eps, weights()[0]), (0,), way)
    return _case(setting, projection, runs, (x, gain, out), verify, baseline)


def _linear_residual(
    config: ModelConfig,
    setting: Setting,
    projection: Projection,
    weights: Lazy,
    batch: int,
    way: str,
) -> Case:
    x, residual = normal(setting, batch, projection.k), normal(setting, batch, projection.n)
    runs = [bind("linear_residual_", residual, x, weight, way=way) for weight in weights()]

    def baseline() -> Baseline:
        calls = [
            partial(torch.addmm, residual, x, weight.t(), out=residual) for weight in weights()
        ]
        return Baseline("torch.addmm", calls)

    verify = partial(verify_call, "linear_residual_", (residual, x, weights()[0]), (0,), way)
    return _case(setting, projection, runs, (x, residual, residual), verify, baseline)


def _norm_swiglu(
    config: ModelConfig,
    setting: Setting,
    projection: Projection,
    weights: Lazy,
    batch: int,
    way: str,
) -> Case:
    x, gain, eps = (
        normal(setting, batch, projection.k),
        1 + normal(setting, projection.k, deviation=0.1),
        config.rms_eps,
    )
    out = unwritten(setting, batch, config.intermediate)
    runs = [bind("norm_swiglu_into", out, x, gain, eps, weight, way=way) for weight in weights()]

    def composed(weight: torch.Tensor) -> None:
        gate, up = torch.mm(F.rms_norm(x, (projection.k,), gain, eps), weight.t()).chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def baseline() -> Baseline:
        return Baseline(
            "F.rms_norm, torch.mm, F.silu, torch.mul",
            [partial(composed, weight) for weight in weights()],
        )

    verify = partial(verify_call, "norm_swiglu_into", (out, x, gain, eps, weights()[0]), (0,), way)
    return _case(setting, projection, runs, (x, gain, out), verify, baseline)


_MAKERS = {
    "linear_into": _linear,
    "norm_linear_into": _norm_linear,
    "linear_residual_": _linear_residual,
    "norm_swiglu_into": _norm_swiglu,
}
