"""The ops inside torch.compile: symbolic sizes stay symbolic, and wrong calls fail while they
are traced.
"""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops, reference
from tests.ops.numeric import assert_same_bits, randn


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.rms_norm_into(out, x * 2, weight, 1e-5)
    return out + 1


def test_one_graph_serves_all_sizes() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(normalized, backend=count, dynamic=True, fullgraph=True)
    weight = randn(16, dtype=torch.float32, device="cpu")
    for num_tokens in (3, 4, 9):
        x = randn(num_tokens, 16, dtype=torch.float32, device="cpu", seed=num_tokens)
        torch._dynamo.mark_dynamic(x, 0)  # an error if anything makes the size a constant
        assert_same_bits(compiled(x, weight), normalized(x, weight))
    assert len(graphs) == 1


def test_updates_are_seen_through_functionalization() -> None:
    def step(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.add_rms_norm_into(out, residual, x, weight, 1e-5)
        return out + residual

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    weight = randn(8, dtype=torch.float32, device="cpu", seed=2)
    residual, x = (randn(3, 8, dtype=torch.float32, device="cpu", seed=s) for s in (0, 1))
    expected = residual.clone()
    wanted = step(expected, x, weight)
    assert_same_bits(compiled(residual, x, weight), wanted)
    assert_same_bits(residual, expected)
    torch.testing.assert_close(wanted, reference.rms_norm(expected, weight, 1e-5) + expected)


def test_an_mlp_of_fused_linears_compiles_to_the_same_bits() -> None:
    def step(
        residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        act = residual.new_empty(len(residual), down.shape[1])
        ops.norm_swiglu_into(act, residual, norm, 1e-5, gate_up, hopper=True)
        ops.linear_residual_(residual, act, down, hopper=True)
        logits = residual.new_empty(len(residual), len(gate_up))
        ops.norm_linear_into(logits, residual, norm, 1e-5, gate_up, hopper=True)
        return logits

    shapes = ((3, 8), (8,), (12, 8), (8, 6))
    residual, *weights = (
        randn(*shape, dtype=torch.float32, device="cpu", seed=seed)
        for seed, shape in enumerate(shapes)
    )
    expected = residual.clone()
    wanted = step(expected, *weights)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(residual, *weights), wanted)
    assert_same_bits(residual, expected)


def test_a_wrong_call_fails_while_it_is_traced() -> None:
    compiled = torch.compile(normalized, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"rms_norm_into: weight has shape \[7\], expected \[8\]"):
        compiled(torch.zeros(2, 8), torch.zeros(7))
