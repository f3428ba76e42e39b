"""Ops that depend on each other: a layer's linears at a model's shapes, and tiny ops whose whole
time is the dependency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.replay import Run
from benchmarks.kernel_cases.case import Case, Lazy, Plan, Setting, bind, compare, normal, unwritten
from benchmarks.kernel_cases.linears import projections
from photon_ext import reference
from photon_ext.models.config import ModelConfig

FUSED = ("norm_linear_into", "linear_residual_", "norm_swiglu_into")
SEPARATE = ("rms_norm_into", "linear_into", "add_rms_norm_into", "silu_mul_into")
# torch first: the others are compared with it
WAYS = {"torch": (), "plain": SEPARATE, "portable": FUSED, "hopper": FUSED}
# kernels of a layer without attention
DEPENDENCIES = {"plain": 7, "portable": 4, "hopper": 4, "torch": 8}
TINY_WIDTH = 512
TINY_PAIRS = 64
SLACK = 3.0  # errors of four ops in a row


class Layer(NamedTuple):
    """Weights of one layer."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Buffers(NamedTuple):
    """Activations of a batch.

    `attended` is the part of `qkv` that stands for what attention would give to o.
    """

    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    projected: torch.Tensor
    gate_up: torch.Tensor
    act: torch.Tensor

    def clone(self, config: ModelConfig) -> Buffers:
        copies = [tensor.clone() for tensor in self]
        copies[3] = copies[2][:, : config.q_size]
        return Buffers(*copies)


def chain_groups(config: ModelConfig, setting: Setting, batches: list[int]) -> Iterator[list[Plan]]:
    """All linears of a model's layers one after the other (attention left out), and chains of
    tiny ops.
    """
    nbytes = setting.dtype.itemsize * sum(
        p.n * p.k for p in projections(config) if p.what != "lm_head"
    )
    layers = Lazy(partial(_layers, config, setting, setting.rotation.copies(nbytes)))
    memory = setting.rotation.copies(nbytes) * nbytes
    yield [
        Plan(
            ops,
            "layers",
            {"batch": batch},
            way,
            partial(_layer_chain, config, setting, layers, nbytes, batch, way),
            memory,
        )
        for batch in batches
        for way, ops in WAYS.items()
    ]
    tiny: dict[str, tuple[str, ...]] = {
        "torch": (),
        "plain": ("linear_into",),
        "portable": FUSED[:2],
        "hopper": FUSED[:2],
    }
    yield [
        Plan(ops, "dependency", {"batch": batch}, way, partial(_tiny_chain, setting, batch, way))
        for batch in batches
        for way, ops in tiny.items()
    ]


def _layers(config: ModelConfig, setting: Setting, copies: int) -> list[Layer]:
    shapes = [p for p in projections(config) if p.what != "lm_head"]
    stacks = [normal(setting, copies, p.n, p.k, deviation=p.k**-0.5) for p in shapes]
    return [Layer(*weights) for weights in zip(*stacks, strict=True)]


def _layer_chain(
    config: ModelConfig, setting: Setting, layers: Lazy, nbytes: int, batch: int, way: str
) -> Case:
    gain = 1 + normal(setting, config.hidden, deviation=0.1)
    qkv = unwritten(setting, batch, config.qkv_size)
    buffers = Buffers(
        residual=normal(setting, batch, config.hidden),
        normed=unwritten(setting, batch, config.hidden),
        qkv=qkv,
        attended=qkv[:, : config.q_size],
        projected=normal(setting, batch, config.hidden, seed=1),
        gate_up=unwritten(setting, batch, 2 * config.intermediate),
        act=unwritten(setting, batch, config.intermediate),
    )
    steps = [step for layer in layers() for step in _layer_steps(config, layer, buffers, gain, way)]
    per_layer = len(steps) // len(layers())
    runs = [partial(_run_all, steps[i : i + per_layer]) for i in range(0, len(steps), per_layer)]

    def verify() -> float:
        actual, expected = buffers.clone(config), buffers.clone(config)
        _run_all(_layer_steps(config, layers()[0], actual, gain, way))
        _run_all(
            _reference_steps(config, layers()[0], expected, gain, with_projected=way == "plain")
        )
        result = actual.residual + actual.projected if way == "plain" else actual.residual
        return compare("a layer's linears", result, expected.residual, SLACK)

    return Case(
        runs, nbytes, verify, None, setting.rotation.cold(nbytes), dependencies=DEPENDENCIES[way]
    )


def _run_all(steps: list[Run]) -> None:
    for step in steps:
        step()


def _layer_steps(
    config: ModelConfig, layer: Layer, b: Buffers, gain: torch.Tensor, way: str
) -> list[Run]:
    """The calls of one layer.

    The separate ops add down's output with the next layer's first norm; so they begin with one to
    add.
    """
    eps, hidden = config.rms_eps, (config.hidden,)
    if way == "plain":
        return [
            bind("add_rms_norm_into", b.normed, b.residual, b.projected, gain, eps),
            bind("linear_into", b.qkv, b.normed, layer.qkv),
            bind("linear_into", b.projected, b.attended, layer.o),
            bind("add_rms_norm_into", b.normed, b.residual, b.projected, gain, eps),
            bind("linear_into", b.gate_up, b.normed, layer.gate_up),
            bind("silu_mul_into", b.act, b.gate_up),
            bind("linear_into", b.projected, b.act, layer.down),
        ]
    if way == "torch":
        gate, up = b.gate_up.chunk(2, dim=-1)
        return [
            lambda: torch.mm(F.rms_norm(b.residual, hidden, gain, eps), layer.qkv.t(), out=b.qkv),
            lambda: torch.addmm(b.residual, b.attended, layer.o.t(), out=b.residual),
            lambda: torch.mm(
                F.rms_norm(b.residual, hidden, gain, eps), layer.gate_up.t(), out=b.gate_up
            ),
            lambda: torch.mul(F.silu(gate), up, out=b.act),
            lambda: torch.addmm(b.residual, b.act, layer.down.t(), out=b.residual),
        ]
    pdl = way == "hopper"  # as in a decode step, whose kernels start while the ones before end
    return [
        bind("norm_linear_into", b.qkv, b.residual, gain, eps, layer.qkv, way=way, pdl=pdl),
        bind("linear_residual_", b.residual, b.attended, layer.o, way=way, pdl=pdl),
        bind("norm_swiglu_into", b.act, b.residual, gain, eps, layer.gate_up, way=way, pdl=pdl),
        bind("linear_residual_", b.residual, b.act, layer.down, way=way, pdl=pdl),
    ]


def _reference_steps(
    config: ModelConfig, layer: Layer, b: Buffers, gain: torch.Tensor, with_projected: bool
) -> list[Callable[[], Any]]:
    """The same layer in plain PyTorch, rounded where the separate ops round."""

    def add(x: torch.Tensor) -> None:
        b.residual.copy_(b.residual.float() + x.float())

    def body() -> None:
        if with_projected:
            add(b.projected)
        qkv = reference.linear(reference.rms_norm(b.residual, gain, config.rms_eps), layer.qkv)
        add(reference.linear(qkv[:, : config.q_size], layer.o))
        gate_up = reference.linear(
            reference.rms_norm(b.residual, gain, config.rms_eps), layer.gate_up
        )
        add(reference.linear(reference.silu_mul(gate_up), layer.down))

    return [body]


def _tiny_chain(setting: Setting, batch: int, way: str) -> Case:
    """Two small matrices by turns, each reading what the one before wrote.

    They keep lengths: no value grows over the replays.
    """
    first, second = (_orthogonal(setting, seed) for seed in (0, 1))
    x, h = normal(setting, batch, TINY_WIDTH), unwritten(setting, batch, TINY_WIDTH)
    gain = torch.ones(TINY_WIDTH, dtype=setting.dtype, device=setting.device)
    start = x.clone()
    pair: list[Run]
    if way == "plain":
        pair = [bind("linear_into", h, x, first), bind("linear_into", x, h, second)]
    elif way == "torch":
        pair = [partial(torch.mm, x, first.t(), out=h), partial(torch.mm, h, second.t(), out=x)]
    else:
        options = {"way": way, "pdl": way == "hopper"}
        pair = [
            bind("norm_linear_into", h, x, gain, 1e-6, first, **options),
            bind("linear_residual_", x, h, second, **options),
        ]

    def verify() -> float:
        _run_all(pair)
        if way in ("plain", "torch"):
            expected = reference.linear(reference.linear(start, first), second)
        else:
            expected = start + reference.linear(
                reference.linear(reference.rms_norm(start, gain, 1e-6), first), second
            )
        return compare("a pair of tiny linears", x, expected, SLACK)

    runs = [partial(_run_all, pair)] * TINY_PAIRS
    return Case(runs, 0, verify, None, cold=False, dependencies=len(pair))


def _orthogonal(setting: Setting, seed: int) -> torch.Tensor:
    square = torch.randn(TINY_WIDTH, TINY_WIDTH, generator=torch.Generator().manual_seed(seed))
    made: torch.Tensor = torch.linalg.qr(square).Q.contiguous().to(setting.device, setting.dtype)
    return made
