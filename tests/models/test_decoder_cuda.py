"""The decoder on CUDA against the decoder on the CPU, with random weights in float32; needs
neither transformers nor files.
"""

from __future__ import annotations

import pytest
import torch

from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.weights import DecoderWeights, empty_weights, random_weights, weight_slots
from photon_ext.runtime.step import StepKind
from tests.models.harness import Chunk, Harness

pytestmark = pytest.mark.gpu

CONFIGS = {
    "llama-6-2-24-tied": ModelConfig(Family.LLAMA, 30, 3, 6, 2, 24, 45, 131, tied_embeddings=True),
    "llama-7-1-96-biased": ModelConfig(
        Family.LLAMA, 49, 3, 7, 1, 96, 45, 131, qkv_bias=True, o_bias=True, mlp_bias=True
    ),
    "qwen3-4-2-128": ModelConfig(Family.QWEN3, 64, 3, 4, 2, 128, 96, 131),
}
PROMPT = [(7 * i) % 131 for i in range(60)]


def decoder_weights(config: ModelConfig, device: str) -> DecoderWeights:
    """Random weights, ten times larger than those of benchmarks so that logits differ, the same
    on both devices.
    """
    source, weights = (
        random_weights(config, torch.float32),
        empty_weights(config, torch.float32, device),
    )
    for (name, slot), (_, values) in zip(weight_slots(weights), weight_slots(source), strict=True):
        slot.copy_(values if name.endswith("norm.weight") else 10 * values)
    return weights


def harness(name: str, device: str, exact: bool = True) -> Harness:
    return Harness(CONFIGS[name], decoder_weights(CONFIGS[name], device), exact=exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_cuda_equals_cpu(name: str, exact: bool) -> None:
    """With the plain kernels, and with long eager prefill steps through torch."""
    cpu, cuda = harness(name, "cpu"), harness(name, "cuda", exact)
    for one in (Chunk(1, 0, PROMPT[:50]), Chunk(1, 50, PROMPT[50:])):
        torch.testing.assert_close(
            cuda.prefill([one]).cpu(), cpu.prefill([one]), atol=1e-4, rtol=1e-4
        )
    logits = (decoder.decode([1], [60], [5]).cpu() for decoder in (cuda, cpu))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_kernels_do_not_depend_on_chunks_or_batch(name: str) -> None:
    cuda = harness(name, "cuda")
    whole = cuda.prefill([Chunk(1, 0, PROMPT)])
    cuda.prefill([Chunk(2, 0, PROMPT[:23])])
    assert torch.equal(cuda.prefill([Chunk(2, 23, PROMPT[23:])], padding=4), whole)
    alone = torch.cat([cuda.decode([row], [60], [row]) for row in (1, 2)])
    assert torch.equal(cuda.decode([1, 2], [60, 60], [1, 2], padding=3), alone)


def test_a_captured_forward_replays_at_other_positions() -> None:
    """One graph serves every position: nothing of a step is in the launch arguments."""
    eager, captured = harness("qwen3-4-2-128", "cuda"), harness("qwen3-4-2-128", "cuda")
    for one in (eager, captured):
        one.prefill([Chunk(1, 0, PROMPT[:4])])
    step = captured.make_step(StepKind.DECODE, [Chunk(1, 4, [9])])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.decoder.forward(step)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.decoder.forward(step)
    for position in range(4, 40):
        step.decode_meta.copy_(
            torch.tensor([[PROMPT[position], position, position + 1, 1]], dtype=torch.int32)
        )
        graph.replay()
        assert step.logits is not None
        assert torch.equal(step.logits, eager.decode([1], [position], [PROMPT[position]]))


def test_forwards_do_not_allocate() -> None:
    cuda = harness("qwen3-4-2-128", "cuda")
    step = cuda.make_step(StepKind.PREFILL, [Chunk(1, 0, PROMPT[:20])])
    cuda.decoder.forward(step)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    cuda.decoder.forward(step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
