"""The fused linears with adapters: near the float64 reference, the same bits in every batch, and
those of the plain linears for tokens without an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from photon_ext import ops, reference
from tests.ops.numeric import DTYPES, assert_close, assert_same_bits, ints, poisoned, randn
from tests.ops.test_lora import EPS, MIXED, described, live

PARTS = {"norm_linear": (64, 32, 32), "residual": (128,), "swiglu": (88, 88)}
SLOTS = 3
# 11 tokens; more than a tile of one slot; every size of the kernel; more than the kernel takes
BATCHES = {
    "one": [3],
    "mixed": MIXED,
    "same slot": [2] * 20,
    "two of a tile": [4] * 9 + MIXED + [1] * 3,
    "sixty": MIXED * 5 + [3] * 9,
    "many": [4] * 70 + MIXED,
}


@dataclass
class Case:
    """A linear of `kind`, its adapters, and where they work."""

    kind: str
    weight: Tensor
    bias: Tensor
    norm: Tensor
    a: Tensor
    b: Tensor
    exchange: Tensor

    @property
    def outputs(self) -> int:
        n = sum(PARTS[self.kind])
        return n // 2 if self.kind == "swiglu" else n

    def run(
        self, x: Tensor, old: Tensor, rows: list[int], hopper: bool = True, exact: bool = False
    ) -> Tensor:
        """The outputs of tokens `x`, to which `old` counts where the kind adds to it; `exact`: by
        the reference, in float64.
        """
        device = x.device.type
        meta, table = described(rows, device)
        tensors = [x, self.weight, self.bias, self.norm, self.a, self.b, old]
        if exact:
            tensors = [tensor.double() for tensor in tensors]
        x, weight, bias, norm, a, b, old = tensors
        module = reference if exact else ops
        parts, rank = len(PARTS[self.kind]), b.shape[2]
        h = poisoned(len(x), parts * rank, dtype=x.dtype, device=device)
        end = (h, a, b, meta, table)
        counts = ints([len(rows)], device)
        if self.kind == "residual":
            out = old.clone()
            module.lora_linear_residual_(
                out, x, weight, bias, counts, *end, self.exchange, hopper=hopper
            )
            return out
        out = poisoned(len(x), self.outputs, dtype=x.dtype, device=device)
        linear = (x, norm, EPS, weight, bias, counts)
        if self.kind == "swiglu":
            gate_up = poisoned(len(x), len(weight), dtype=x.dtype, device=device)
            module.lora_norm_swiglu_into(out, gate_up, *linear, *end, self.exchange, hopper=hopper)
        else:
            module.lora_norm_linear_into(
                out, *linear, *end, PARTS[self.kind][0], self.exchange, hopper=hopper
            )
        return out

    def plain(self, x: Tensor, old: Tensor, hopper: bool = True) -> Tensor:
        """Without adapters."""
        if self.kind == "residual":
            out = old.clone()
            ops.linear_residual_(out, x, self.weight, self.bias, hopper=hopper)
            return out
        op = ops.norm_swiglu if self.kind == "swiglu" else ops.norm_linear
        return op(x, self.norm, EPS, self.weight, self.bias, hopper=hopper)


def made(kind: str, k: int, rank: int, dtype: torch.dtype, device: str) -> Case:
    n, columns = sum(PARTS[kind]), len(PARTS[kind]) * rank
    return Case(
        kind,
        randn(n, k, dtype=dtype, device=device, seed=1) / k**0.5,
        randn(n, dtype=dtype, device=device, seed=2),
        randn(k, dtype=dtype, device=device, seed=3),
        randn(SLOTS, columns, k, dtype=dtype, device=device, seed=4) / k**0.5,
        randn(SLOTS, n, rank, dtype=dtype, device=device, seed=5),
        torch.zeros(ops.LORA_EXCHANGE_WORDS, device=device),
    )


def tokens(case: Case, count: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = randn(count, case.weight.shape[1], dtype=dtype, device=device, seed=6)
    return x, randn(count, case.outputs, dtype=dtype, device=device, seed=7)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_are_near_the_reference(device: str, kind: str, batch: str) -> None:
    rows = BATCHES[batch]
    case = made(kind, 1600, 16, torch.bfloat16, device)
    x, old = tokens(case, len(rows), torch.bfloat16, device)
    out = case.run(x, old, rows)
    exact = case.run(x, old, rows, exact=True)
    assert_close(out, exact, slack=2)
    with_adapter = live(rows)
    assert_close(out[with_adapter], exact[with_adapter], slack=2)
    away = (case.plain(x, old)[with_adapter] - exact[with_adapter]).norm()
    assert away > 0.1 * exact[with_adapter].norm()


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "rank"), [(192, 8), (320, 16), (7104, 16), (192, 24), (200, 5)])
def test_every_size_is_near_the_reference(
    device: str, kind: str, dtype: torch.dtype, k: int, rank: int
) -> None:
    case = made(kind, k, rank, dtype, device)
    x, old = tokens(case, len(MIXED), dtype, device)
    out = case.run(x, old, MIXED)
    assert_close(out, case.run(x, old, MIXED, exact=True), slack=2)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("rank", [8, 16])
def test_a_token_has_the_same_bits_in_every_batch(device: str, kind: str, rank: int) -> None:
    case = made(kind, 1600, rank, torch.bfloat16, device)
    rows = BATCHES["many"]
    x, old = tokens(case, len(rows), torch.bfloat16, device)
    many = case.run(x, old, rows)
    for first, count in ((70, 1), (75, 1), (69, 3), (60, 21), (40, 41), (17, 64)):
        some = slice(first, first + count)
        assert_same_bits(case.run(x[some], old[some], rows[some]), many[some])


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("batch", ["mixed", "sixty", "many"])
def test_tokens_without_an_adapter_have_the_bits_of_the_plain_linear(
    device: str, kind: str, hopper: bool, batch: str
) -> None:
    rows = BATCHES[batch]
    case = made(kind, 640, 16, torch.bfloat16, device)
    x, old = tokens(case, len(rows), torch.bfloat16, device)
    without = [i for i in range(len(rows)) if i not in live(rows)]
    out = case.run(x, old, rows, hopper)
    assert_same_bits(out[without], case.plain(x, old, hopper)[without])


@pytest.mark.parametrize("kind", PARTS)
def test_dead_tokens_at_the_end_are_left_alone(device: str, kind: str) -> None:
    case = made(kind, 320, 16, torch.bfloat16, device)
    x, old = tokens(case, len(MIXED) + 6, torch.bfloat16, device)
    meta, table = described(MIXED + [0] * 6, device)
    rank, parts = 16, len(PARTS[kind])
    h = poisoned(len(x), parts * rank, dtype=x.dtype, device=device)
    counts, end = ints([len(MIXED)], device), (h, case.a, case.b, meta, table)
    expected = case.run(x[: len(MIXED)], old[: len(MIXED)], MIXED)
    out = old.clone()
    if kind == "residual":
        ops.lora_linear_residual_(
            out, x, case.weight, case.bias, counts, *end, case.exchange, hopper=True
        )
    elif kind == "swiglu":
        gate_up = poisoned(len(x), len(case.weight), dtype=x.dtype, device=device)
        ops.lora_norm_swiglu_into(
            out,
            gate_up,
            x,
            case.norm,
            EPS,
            case.weight,
            case.bias,
            counts,
            *end,
            case.exchange,
            hopper=True,
        )
    else:
        ops.lora_norm_linear_into(
            out,
            x,
            case.norm,
            EPS,
            case.weight,
            case.bias,
            counts,
            *end,
            PARTS[kind][0],
            case.exchange,
            hopper=True,
        )
    assert_same_bits(out[: len(MIXED)], expected)
    if kind != "swiglu" or device == "cuda":
        assert_same_bits(out[len(MIXED) :], old[len(MIXED) :])


@pytest.mark.parametrize("kind", PARTS)
def test_a_step_without_adapters_is_the_plain_linear(device: str, kind: str) -> None:
    case = made(kind, 320, 16, torch.bfloat16, device)
    x, old = tokens(case, 5, torch.bfloat16, device)
    assert_same_bits(case.run(x, old, [1] * 5), case.plain(x, old))
