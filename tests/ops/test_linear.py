from __future__ import annotations

import pytest
import torch

from photon_ext import num_threads, ops, reference, set_num_threads
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
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 7), (64, 64), (130, 577)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_near_the_float64_reference(
    device: str, dtype: torch.dtype, num_tokens: int, n: int, k: int, with_bias: bool
) -> None:
    x = randn(num_tokens, k, dtype=dtype, device=device)
    weight = randn(n, k, dtype=dtype, device=device, seed=1)
    bias = randn(n, dtype=dtype, device=device, seed=2) if with_bias else None
    out = poisoned(num_tokens, n, dtype=dtype, device=device)
    ops.linear_into(out, x, weight, bias)
    exact = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(out, exact)
    assert_same_bits(ops.linear(x, weight, bias), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 9), (70, 576)])
def test_gemv_has_the_bits_of_linear(device: str, dtype: torch.dtype, n: int, k: int) -> None:
    x = randn(k, dtype=dtype, device=device)
    weight = randn(n, k, dtype=dtype, device=device, seed=1)
    bias = randn(n, dtype=dtype, device=device, seed=2)
    out = poisoned(n, dtype=dtype, device=device)
    ops.gemv_into(out, x, weight, bias)
    assert_same_bits(out, ops.linear(x[None], weight, bias)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_operands(device: str, dtype: torch.dtype) -> None:
    x = in_wider_tokens(randn(9, 40, dtype=dtype, device=device))
    weight = in_wider_tokens(randn(21, 40, dtype=dtype, device=device, seed=1))
    buffer = poisoned(9, 30, dtype=dtype, device=device)
    ops.linear_into(buffer[:, 4:25], x, weight)
    assert_close(buffer[:, 4:25], reference.linear(x.double(), weight.double()))
    assert buffer[:, :4].isnan().all()
    assert buffer[:, 25:].isnan().all()


@pytest.mark.parametrize("counts", [-1, 0, 1, 4, 5, 99])
def test_counts_computes_the_leading_tokens_only(device: str, counts: int) -> None:
    x = randn(5, 48, dtype=torch.float32, device=device)
    weight = randn(20, 48, dtype=torch.float32, device=device, seed=1)
    out = poisoned(5, 20, dtype=torch.float32, device=device)
    ops.linear_into(out, x, weight, None, ints([counts, 7], device))
    done = min(max(counts, 0), 5)
    assert_same_bits(out[:done], ops.linear(x, weight)[:done])
    assert out[done:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(70, 576), (33, 61), (8, 1553)])
def test_a_token_alone_has_the_bits_it_has_in_a_batch(
    device: str, dtype: torch.dtype, n: int, k: int
) -> None:
    x = randn(49, k, dtype=dtype, device=device)
    weight = randn(n, k, dtype=dtype, device=device, seed=1)
    together = ops.linear(x, weight)
    for size in (1, 2, 3, 8, 17):
        pieces = torch.cat([ops.linear(x[i : i + size], weight) for i in range(0, 49, size)])
        assert_same_bits(pieces, together)


@pytest.mark.emulated_once
def test_cpu_results_do_not_depend_on_the_number_of_threads() -> None:
    x = randn(5, 576, dtype=torch.float32, device="cpu")
    weight = randn(900, 576, dtype=torch.float32, device="cpu", seed=1)
    before = num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            set_num_threads(threads)
            assert num_threads() == threads
            results.append(ops.linear(x, weight))
    finally:
        set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", None, True])
def test_a_number_of_threads_that_is_none_is_refused(threads: object) -> None:
    with pytest.raises(
        ValueError,
        match=rf"set_num_threads: threads is {threads!r}, expected an integer, 1 or more",
    ):
        set_num_threads(threads)  # type: ignore[arg-type]


def test_more_threads_than_there_may_be_are_as_many_as_there_may_be() -> None:
    before = num_threads()
    try:
        set_num_threads(torch.tensor(2))  # type: ignore[arg-type]  # an index
        assert num_threads() == 2
        set_num_threads(300)
        most = num_threads()
        set_num_threads(2**32 + 1)
        assert num_threads() == most > 1
    finally:
        set_num_threads(before)
