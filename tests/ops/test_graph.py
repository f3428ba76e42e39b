"""Every op in a CUDA graph: its replay does what the op does at once, and neither takes memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.numeric import assert_same_bits
from tests.ops.test_opcheck import CASES, Arguments, overload

pytestmark = pytest.mark.gpu
TOKENS = 3


def tensors(arguments: Arguments) -> list[Tensor]:
    return [value for value in arguments if isinstance(value, Tensor)]


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("name", CASES)
def test_an_op_can_be_captured_and_allocates_nothing(name: str) -> None:
    op = overload(name)
    fresh, eager, captured = (CASES[name]("cuda", TOKENS) for _ in range(3))
    torch.cuda.synchronize()
    before = allocations()
    op(*eager)
    assert allocations() == before

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = allocations()
        op(*captured)
        after = allocations()
    assert after == before
    for tensor, original in zip(tensors(captured), tensors(fresh), strict=True):
        assert_same_bits(tensor, original)  # a capture runs nothing
    graph.replay()
    for tensor, expected in zip(tensors(captured), tensors(eager), strict=True):
        assert_same_bits(tensor, expected)
