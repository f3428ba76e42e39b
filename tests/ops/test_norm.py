from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from tests.ops.numeric import (
    DTYPES,
    assert_close,
    assert_same_bits,
    in_wider_tokens,
    poisoned,
    randn,
)

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 33])
@pytest.mark.parametrize("hidden", [1, 7, 64, 577])
def test_rms_norm_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, num_tokens: int, hidden: int
) -> None:
    x = randn(num_tokens, hidden, dtype=dtype, device=device)
    weight = randn(hidden, dtype=dtype, device=device, seed=1)
    out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
    ops.rms_norm_into(out, x, weight, EPS)
    assert_close(out, reference.rms_norm(x.double(), weight.double(), EPS))
    assert_same_bits(ops.rms_norm(x, weight, EPS), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 7), (3, 576), (33, 65)])
def test_add_rms_norm_rounds_the_sum_before_it_normalizes(
    device: str, dtype: torch.dtype, num_tokens: int, hidden: int
) -> None:
    x = randn(num_tokens, hidden, dtype=dtype, device=device)
    residual = randn(num_tokens, hidden, dtype=dtype, device=device, seed=1)
    weight = randn(hidden, dtype=dtype, device=device, seed=2)
    out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
    expected_sum = residual + x
    ops.add_rms_norm_into(out, residual, x, weight, EPS)
    assert_same_bits(residual, expected_sum)
    assert_close(out, reference.rms_norm(expected_sum.double(), weight.double(), EPS))


@pytest.mark.parametrize("hidden", [8192, 8200, 8203])
def test_tokens_wider_than_a_cta_has_packs(device: str, hidden: int) -> None:
    """A thread of the CUDA kernel has one pack up to 8,192 elements, and then some have two."""
    x = randn(2, hidden, dtype=torch.bfloat16, device=device)
    residual = randn(2, hidden, dtype=torch.bfloat16, device=device, seed=1)
    weight = randn(hidden, dtype=torch.bfloat16, device=device, seed=2)
    out = poisoned(2, hidden, dtype=torch.bfloat16, device=device)
    expected_sum = residual + x
    ops.add_rms_norm_into(out, residual, x, weight, EPS)
    assert_same_bits(residual, expected_sum)
    assert_close(out, reference.rms_norm(expected_sum.double(), weight.double(), EPS))
    assert_same_bits(ops.rms_norm(residual, weight, EPS), out)


def test_strided_tokens_leave_the_gaps_alone(device: str) -> None:
    x = in_wider_tokens(randn(5, 37, dtype=torch.bfloat16, device=device))
    residual = in_wider_tokens(randn(5, 37, dtype=torch.bfloat16, device=device, seed=1))
    weight = randn(37, dtype=torch.bfloat16, device=device, seed=2)
    buffer = poisoned(5, 64, dtype=torch.bfloat16, device=device)
    ops.add_rms_norm_into(buffer[:, 9:46], residual, x, weight, EPS)
    expected = torch.empty(5, 37, dtype=torch.bfloat16, device=device)
    ops.rms_norm_into(expected, residual.contiguous(), weight, EPS)
    assert_same_bits(buffer[:, 9:46], expected)
    assert buffer[:, :9].isnan().all()
    assert buffer[:, 46:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(device: str, dtype: torch.dtype) -> None:
    x = randn(33, 576, dtype=dtype, device=device)
    weight = randn(576, dtype=dtype, device=device, seed=1)
    together = ops.rms_norm(x, weight, EPS)
    alone = torch.cat([ops.rms_norm(x[i : i + 1], weight, EPS) for i in range(33)])
    assert_same_bits(alone, together)


def test_large_values_do_not_overflow_float16(device: str) -> None:
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    torch.testing.assert_close(ops.rms_norm(x, weight, EPS), torch.ones_like(x))


@pytest.mark.gpu
def test_more_tokens_than_a_grid_has_blocks_are_an_error() -> None:
    """2^32 + 1 tokens: narrowed to 32 bits they would be one, and all others silently left as
    they are.
    """
    num_tokens = 2**32 + 1
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of GPU memory")
    x = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(num_tokens, 1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(
        RuntimeError, match="rms_norm_into: CUDA said: invalid configuration argument"
    ):
        ops.rms_norm_into(out, x.expand(num_tokens, 1), x[0], EPS)
