from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    ints,
    poisoned,
    randn,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 33])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_silu_mul_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    gate_up = 3 * randn(num_tokens, 2 * width, dtype=dtype, device=device)
    out = poisoned(num_tokens, width, dtype=dtype, device=device)
    ops.silu_mul_into(out, gate_up)
    assert_close(out, reference.silu_mul(gate_up.double()))
    assert_same_bits(ops.silu_mul(gate_up), out)


def test_silu_mul_of_extreme_gates(device: str) -> None:
    gate = torch.tensor([-200.0, -90.0, -0.0, 90.0, 200.0], device=device)
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(
        out, torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0], device=device), atol=1e-30, rtol=1e-6
    )


@pytest.mark.parametrize("width", [2048, 2056, 9737])
def test_silu_mul_of_tokens_that_ctas_share(device: str, width: int) -> None:
    """A CTA of the CUDA kernel has 2,048 elements at most."""
    gate_up = 3 * randn(3, 2 * width, dtype=torch.bfloat16, device=device)
    out = poisoned(3, width, dtype=torch.bfloat16, device=device)
    ops.silu_mul_into(out, gate_up)
    assert_close(out, reference.silu_mul(gate_up.double()))


def test_silu_mul_of_strided_tokens(device: str) -> None:
    gate_up = in_wider_tokens(randn(6, 26, dtype=torch.float16, device=device))
    buffer = poisoned(6, 20, dtype=torch.float16, device=device)
    ops.silu_mul_into(buffer[:, 3:16], gate_up)
    assert_same_bits(buffer[:, 3:16], ops.silu_mul(gate_up.contiguous()))
    assert buffer[:, :3].isnan().all()
    assert buffer[:, 16:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 33])
@pytest.mark.parametrize(("hidden", "intermediate"), [(7, 5), (64, 96), (65, 130)])
def test_fused_mlp_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, num_tokens: int, hidden: int, intermediate: int
) -> None:
    x = randn(num_tokens, hidden, dtype=dtype, device=device)
    gate_up = randn(2 * intermediate, hidden, dtype=dtype, device=device, seed=1)
    down = randn(hidden, intermediate, dtype=dtype, device=device, seed=2)
    out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
    act = poisoned(num_tokens, intermediate, dtype=dtype, device=device)
    ops.fused_mlp_into(out, act, x, gate_up, down)
    assert_close(out, reference.fused_mlp(x.double(), gate_up.double(), down.double()), slack=2)
    assert_same_bits(ops.fused_mlp(x, gate_up, down), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_mlp_has_the_bits_of_its_parts_and_of_each_token_alone(
    device: str, dtype: torch.dtype
) -> None:
    x = randn(9, 64, dtype=dtype, device=device)
    gate_up = randn(192, 64, dtype=dtype, device=device, seed=1)
    down = randn(64, 96, dtype=dtype, device=device, seed=2)
    together = ops.fused_mlp(x, gate_up, down)
    alone = torch.cat([ops.fused_mlp(x[i : i + 1], gate_up, down) for i in range(9)])
    assert_same_bits(alone, together)
    parts = ops.linear(ops.silu_mul(ops.linear(x, gate_up)), down)
    assert_close(together, parts.double())


@pytest.mark.parametrize("counts", [0, 2, 5])
def test_counts_computes_the_leading_tokens_only(device: str, counts: int) -> None:
    x = randn(5, 24, dtype=torch.float32, device=device)
    gate_up = randn(32, 24, dtype=torch.float32, device=device, seed=1)
    down = randn(24, 16, dtype=torch.float32, device=device, seed=2)
    out = poisoned(5, 24, dtype=torch.float32, device=device)
    act = poisoned(5, 16, dtype=torch.float32, device=device)
    ops.fused_mlp_into(out, act, x, gate_up, down, ints([counts], device))
    assert_same_bits(out[:counts], ops.fused_mlp(x, gate_up, down)[:counts])
    assert out[counts:].isnan().all()
