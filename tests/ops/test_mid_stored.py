"""The Hopper linears of weights in fp8, int4 and int8 for 17 to 64 tokens: near the float64
reference, and a token has the same bits in every batch, those of the narrow linears of fewer tokens
among them.
"""

from __future__ import annotations

import pytest
import torch

from photon_ext import _C
from tests.ops.numeric import assert_same_bits, ints
from tests.ops.stored import Kind, in_wider_rows
from tests.ops.test_narrow_stored import (
    KINDS,
    assert_near_float64,
    assert_same_in_groups,
    assert_same_results,
    fused,
    operands,
)

# (n, k): one 8-row tile of a part of a K chunk; an odd number of them; of several K chunks whose
# last is not whole, where two parts of the columns exchange sums; of two M tiles; of two passes.
SHAPES = [(8, 512), (72, 1536), (40, 4608), (360, 512), (1160, 512)]


@pytest.mark.emulated_later(k=(1536, 4608))
@pytest.mark.parametrize("tokens", [17, 32, 57, 64, 71])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_near_the_float64_reference(
    device: str, kind: Kind, n: int, k: int, tokens: int
) -> None:
    assert_near_float64(operands(kind, tokens, n, k, device))


@pytest.mark.emulated_later(k=(1536, 4608))
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(device: str, kind: Kind, n: int, k: int) -> None:
    assert_same_in_groups(operands(kind, 70, n, k, device), (35, 33, 8, 16, 17, 32))


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=str)
@pytest.mark.parametrize("tokens", [36, 66])
def test_only_counted_tokens_are_computed(device: str, kind: Kind, tokens: int) -> None:
    o = operands(kind, tokens, 72, 512, device)
    whole = fused(o)
    for counts in (-1, 0, 1, 31, 33, 63, 65, 99):
        done = min(max(counts, 0), tokens)
        actual = fused(o, ints([counts], device))
        for one, other in zip(actual, whole, strict=True):
            assert_same_bits(one[:done], other[:done])
        assert actual.norm_linear[done:].isnan().all()
        assert actual.norm_swiglu[done:].isnan().all()
        assert_same_bits(actual.linear_residual[done:], o.residual[done:])


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[7]], ids=str)
def test_what_lies_beside_x_does_not_matter(device: str, kind: Kind) -> None:
    """Rows of x and of the weight that lie apart, with NaN between them."""
    o = operands(kind, 41, 40, 1024, device)
    wide = torch.full((41, 1024 + 64), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, :1024] = o.x
    apart = o._replace(x=wide[:, :1024], half=in_wider_rows(o.half, 48))
    assert_same_results(fused(apart), fused(o))


def test_without_a_workspace_the_weights_are_read_again(device: str) -> None:
    o = operands(KINDS[1], 37, 40, 1024, device)
    assert_same_results(fused(o, has_workspace=False), fused(o))


def test_tokens_beyond_16_read_a_weight_of_fewer_bits_once() -> None:
    given = {"op": "linear_residual_", "dtype": "bfloat16", "n": 64, "k": 512, "format": "fp8"}
    for tokens, workspace, kernel, why in (
        (16, True, "narrow", None),
        (17, True, "mid_stored", None),
        (64, True, "mid_stored", None),
        (65, True, "mid_stored", "in groups of 64 tokens"),
        (17, False, "narrow", "in groups of 16 tokens, for want of a workspace"),
    ):
        found = _C.plan_linear(  # type: ignore[call-overload]
            _C.Gpu(9, 0), tokens=tokens, workspace=workspace, **given
        )
        assert found == (kernel, why)
