"""How close a kernel must be to the float64 reference, and memory that tells when it is written
wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error by norm: a few roundings to the dtype, and sums in float32.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Memory that a kernel has to write: NaN, or for integers a value that nothing computes."""
    fill = float("nan") if dtype.is_floating_point else -123456789
    return torch.full(shape, fill, dtype=dtype, device=device)


def in_wider_tokens(x: Tensor, extra: int = 5) -> Tensor:
    """A copy of x [tokens, ...] whose tokens are `extra` poisoned elements apart: strided, and
    nowhere aligned.
    """
    width = x[0].numel() if len(x) else 0
    buffer = poisoned(len(x), width + extra, dtype=x.dtype, device=str(x.device))
    view = (
        buffer[:, extra // 2 : extra // 2 + width].view(x.shape)
        if x.dim() == 2
        else buffer[:, :width].unflatten(1, x.shape[1:])
    )
    view.copy_(x)
    return view


def assert_close(actual: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """`actual` is as near to the float64 `exact` as its dtype allows, times `slack`."""
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all(), "the output holds NaN or inf"
    error = torch.linalg.vector_norm(actual.double() - exact.double())
    size = torch.linalg.vector_norm(exact.double())
    bound = BOUNDS[actual.dtype] * slack
    assert error <= bound * size, f"relative error {error / size:.3g}, bound {bound:.3g}"


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    as_int = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[actual.element_size()]
    return torch.equal(actual.contiguous().view(as_int), expected.contiguous().view(as_int))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert same_bits(actual, expected)
