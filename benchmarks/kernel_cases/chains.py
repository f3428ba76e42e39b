"""Ops that depend on each other: the linears of a model's layers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.replay import Run
from benchmarks.kernel_cases.case import Baseline, Case, Plan, Setting, bind, compare
from benchmarks.kernel_cases.linears import projections
from photon_ext import reference

FUSED = ("norm_linear_into", "linear_residual_", "norm_swiglu_into")
WAYS = ("portable", "hopper")
DEPENDENCIES = 4  # kernels of a layer without attention
SLACK = 3.0  # errors of four ops in a row


class Layer(NamedTuple):
    """Weights of one layer."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def chain_groups(setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """All linears of a model's layers one after the other, attention left out."""
    shapes = [(p.n, p.k) for p in projections(setting.config) if p.what != "lm_head"]
    nbytes = sum(setting.nbytes(*shape) for shape in shapes)
    copies = setting.rotation.copies(nbytes)

    @cache  # made by the first case, and shared by all
    def layers() -> list[Layer]:
        stacks = [setting.normal(copies, n, k, deviation=k**-0.5) for n, k in shapes]
        return [Layer(*weights) for weights in zip(*stacks, strict=True)]

    make = partial(_chain, layers, nbytes)
    sizes = [setting._replace(batch=batch, way=way) for batch in batches for way in WAYS]
    yield [Plan(FUSED, "layers", at, make, copies * nbytes) for at in sizes]


class Buffers(NamedTuple):
    """Activations of a batch; the queries of `qkv` stand for what attention would give to o."""

    residual: torch.Tensor
    qkv: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor


def _chain(layers: Callable[[], list[Layer]], nbytes: int, at: Setting) -> Case:
    config = at.config
    sizes = config.qkv_size, 2 * config.intermediate, config.intermediate
    residual, gain = at.normal(at.batch, config.hidden), at.gain(config.hidden)
    buffers = Buffers(residual, *(at.unwritten(at.batch, size) for size in sizes))
    runs = [partial(_run_all, _steps(at, layer, buffers, gain)) for layer in layers()]

    def verify() -> float:
        layer, actual = layers()[0], residual.clone()
        _run_all(_steps(at, layer, buffers._replace(residual=actual), gain))
        expected = _reference(at, layer, residual, gain)
        return compare("a layer's linears", actual, expected, SLACK)

    def baseline() -> Baseline:
        calls = [partial(_run_torch, at, layer, buffers, gain) for layer in layers()]
        return Baseline("F.rms_norm, torch.mm, torch.addmm, F.silu, torch.mul", calls)

    cold = at.rotation.cold(nbytes)
    return Case(runs, nbytes, verify, baseline, cold, dependencies=DEPENDENCIES)


def _run_all(steps: list[Run]) -> None:
    for step in steps:
        step()


def _steps(at: Setting, layer: Layer, buffers: Buffers, gain: torch.Tensor) -> list[Run]:
    """The calls of one layer."""
    eps, (residual, qkv, _, act) = at.config.rms_eps, buffers
    attended = qkv[:, : at.config.q_size]
    bound = partial(bind, way=at.way, pdl=True)  # a chain is as in a decode step
    return [
        bound("norm_linear_into", qkv, residual, gain, eps, layer.qkv),
        bound("linear_residual_", residual, attended, layer.o),
        bound("norm_swiglu_into", act, residual, gain, eps, layer.gate_up),
        bound("linear_residual_", residual, act, layer.down),
    ]


def _run_torch(at: Setting, layer: Layer, buffers: Buffers, gain: torch.Tensor) -> None:
    """The same layer by torch's calls."""
    residual, qkv, gate_up, act = buffers
    gate, up = gate_up.chunk(2, dim=-1)
    normed = partial(F.rms_norm, residual, gain.shape, gain, at.config.rms_eps)
    torch.mm(normed(), layer.qkv.t(), out=qkv)
    torch.addmm(residual, qkv[:, : at.config.q_size], layer.o.t(), out=residual)
    torch.mm(normed(), layer.gate_up.t(), out=gate_up)
    torch.mul(F.silu(gate), up, out=act)
    torch.addmm(residual, act, layer.down.t(), out=residual)


def _reference(
    at: Setting, layer: Layer, residual: torch.Tensor, gain: torch.Tensor
) -> torch.Tensor:
    """The same layer in plain PyTorch, rounded where separate ops round."""
    eps = at.config.rms_eps
    qkv = reference.linear(reference.rms_norm(residual, gain, eps), layer.qkv)
    added = reference.linear(qkv[:, : at.config.q_size], layer.o)
    x = (residual.float() + added.float()).to(residual.dtype)
    gate_up = reference.linear(reference.rms_norm(x, gain, eps), layer.gate_up)
    added = reference.linear(reference.silu_mul(gate_up), layer.down)
    return (x.float() + added.float()).to(residual.dtype)
