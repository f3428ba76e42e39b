"""The decoder with the fused ops and their Hopper kernels, against the one that goes op by op;
needs neither transformers nor files.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

import photon_ext
from photon_ext import hopper_runs, ops
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import (
    BATCH_TOKENS,
    FUSED_TOKENS,
    LEAST_BATCH_TOKENS,
    NARROW_BATCH_TOKENS,
    ExecutionModes,
    KernelPlan,
    gpu_target,
    plan_kernels,
)
from photon_ext.models.weights import DecoderWeights, empty_weights, random_weights, weight_slots
from photon_ext.runtime.step import StepKind
from tests.models.harness import DEAD, Chunk, Harness

pytestmark = pytest.mark.emulated
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Shapes that the Hopper kernels take, none of them round: head sizes and groups, widths of odd
# multiples of 64, a vocabulary of odd size. The Hopper linears leave 7 heads of 96 and an
# intermediate width of 100 to the portable ones.
CONFIGS = {
    "llama-6-2-64-tied": ModelConfig(
        Family.LLAMA, 192, 2, 6, 2, 64, 320, 131, tied_embeddings=True
    ),
    "llama-7-1-96-biased": ModelConfig(
        Family.LLAMA, 320, 2, 7, 1, 96, 192, 131, qkv_bias=True, o_bias=True, mlp_bias=True
    ),
    "qwen3-4-2-128": ModelConfig(Family.QWEN3, 576, 2, 4, 2, 128, 100, 131),
}
PROMPT = [(7 * i) % 131 for i in range(40)]
LONG = [(5 * i + i // 7) % 131 for i in range(140)]  # of three groups of tokens
BATCHES = (1, 2, 7, 8, 9, 16, 31, 33, 64)
# Pages of 16 tokens: balanced attention reads chunks; of 4: chunk attention does.
PAGE_SIZES = pytest.mark.parametrize("page_size", [4, 16])


@cache
def source(name: str) -> DecoderWeights:
    return random_weights(CONFIGS[name], torch.float32)


def harness(name: str, device: str, dtype: torch.dtype, hopper: bool, **sizes: Any) -> Harness:
    """Random weights, ten times larger than those of benchmarks so that logits differ; in
    float32 those of the other dtypes, rounded.
    """
    config = CONFIGS[name]
    weights = empty_weights(config, dtype, device)
    for (slot_name, slot), (_, values) in zip(
        weight_slots(weights), weight_slots(source(name)), strict=True
    ):
        slot.copy_((values if slot_name.endswith("norm.weight") else 10 * values).bfloat16())
    return Harness(config, weights, hopper=hopper, **{"exact": True, **sizes})


def exact_plan(name: str) -> KernelPlan:
    """Of an exact engine on a GPU."""
    return plan_kernels(CONFIGS[name], gpu_target((9, 0)), "bfloat16", "hopper", exact=True)


def next_logits(decoder: Harness, count: int = 3) -> torch.Tensor:
    """Logits of a prompt and of the decode steps after it, [1 + count, vocab], on the CPU."""
    prompt = decoder.prefill([Chunk(1, 0, PROMPT)])
    return torch.cat(
        [prompt, *(decoder.decode([1], [len(PROMPT) + i], [5 + i]) for i in range(count))]
    ).cpu()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the products that torch computes."""
    shapes, mm = [], torch.mm

    def counted(*factors: torch.Tensor, out: torch.Tensor) -> None:
        shapes.append(out.shape)
        mm(*factors, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_cpu_fused_ops_change_no_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "PHOTON_OPS_LIBRARY" in os.environ:
        pytest.skip("the CUDA kernels run in the emulator, which sum otherwise where ops are fused")
    # prefill steps are fused where they do
    monkeypatch.setattr(photon_ext, "hopper_runs", lambda: True)
    assert torch.equal(
        next_logits(harness(name, "cpu", dtype, hopper=True)),
        next_logits(harness(name, "cpu", dtype, hopper=False)),
    )


@pytest.mark.emulated_later(name=tuple(name for name in CONFIGS if "tied" not in name))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_as_near_to_float32_as_op_by_op(name: str, device: str) -> None:
    exact = next_logits(harness(name, "cpu", torch.float32, hopper=False))
    rounded = next_logits(harness(name, device, torch.bfloat16, hopper=False)).float()
    ours = next_logits(harness(name, device, torch.bfloat16, hopper=True)).float()
    assert (rounded - exact).norm() > 0
    assert (ours - exact).norm() < 1.5 * (rounded - exact).norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, device: str) -> None:
    decoder = harness(name, device, torch.bfloat16, hopper=True, rows=max(BATCHES))
    texts = [PROMPT[: 1 + row % len(PROMPT)] for row in range(max(BATCHES))]
    for row, text in enumerate(texts):
        decoder.prefill([Chunk(row + 1, 0, text)])

    def step(rows: list[int], padding: int = 0) -> torch.Tensor:
        return decoder.decode(
            [row + 1 for row in rows],
            [len(texts[row]) for row in rows],
            [row % 131 for row in rows],
            padding,
        )

    alone = {row: step([row])[0] for row in range(0, max(BATCHES), 5)}
    for batch in BATCHES:
        # not in the same place of every batch
        rows = [(3 * batch + i) % max(BATCHES) for i in range(batch)]
        logits = step(rows, padding=min(2, 64 - batch))
        for place, row in enumerate(rows):
            if row in alone:
                assert torch.equal(logits[place], alone[row]), (batch, place, row)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_repeat_to_the_bit(device: str) -> None:
    decoder = harness("qwen3-4-2-128", device, torch.bfloat16, hopper=True)
    repeats, steps = (3, 3) if device == "cuda" else (1, 1)  # emulated, each takes a second
    first = next_logits(decoder, steps)
    assert all(torch.equal(next_logits(decoder, steps), first) for _ in range(repeats))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_in_batches_of_several_launches(device: str) -> None:
    rows = [*range(1, FUSED_TOKENS + 3)]
    decoder = harness(
        "llama-6-2-64-tied",
        device,
        torch.bfloat16,
        hopper=True,
        rows=len(rows),
        max_step_tokens=2 * len(rows),
    )
    prompts = decoder.prefill([Chunk(row, 0, PROMPT[:2]) for row in rows])
    assert all(torch.equal(token_index, prompts[0]) for token_index in prompts)
    alone = decoder.decode(rows[:1], [2], [7])
    for count in (65, len(rows)):
        assert all(
            torch.equal(token_index, alone[0])
            for token_index in decoder.decode(rows[:count], [2] * count, [7] * count)
        )


@pytest.mark.parametrize("op", ["norm_linear_into", "norm_swiglu_into"])
def test_linears_of_many_tokens_have_a_workspace(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one they go in groups of 64. The head's 66 segments count, too."""
    monkeypatch.setattr(photon_ext, "hopper_runs", lambda: True)
    given, called, rows = [], getattr(ops, op), [*range(1, FUSED_TOKENS + 3)]
    monkeypatch.setattr(
        ops, op, lambda *operands, **options: given.append(options) or called(*operands, **options)
    )
    name = "llama-6-2-64-tied"
    decoder = harness(name, "cpu", torch.bfloat16, hopper=True, rows=len(rows), max_step_tokens=132)
    decoder.prefill([Chunk(row, 0, PROMPT[:2]) for row in rows])
    heads = op == "norm_linear_into"
    assert len(given) == CONFIGS[name].layers + heads
    needed = ops.linear_workspace_words(132, CONFIGS[name].hidden)
    assert all(options["workspace"].numel() >= needed for options in given)


@PAGE_SIZES
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_has_the_same_bits_however_it_is_cut_and_whatever_rides_along(
    name: str, device: str, page_size: int
) -> None:
    sizes = {"max_len": len(LONG), "max_step_tokens": len(LONG) + 60, "page_size": page_size}
    decoder = harness(name, device, torch.bfloat16, hopper=True, plan=exact_plan(name), **sizes)
    whole = decoder.prefill([Chunk(1, 0, LONG)])
    for cut in (1, 70):
        decoder.prefill([Chunk(2, 0, LONG[:cut])], padding=3)
        assert torch.equal(decoder.prefill([Chunk(2, cut, LONG[cut:])]), whole), cut
    together = decoder.prefill([Chunk(3, 0, PROMPT), Chunk(2, 0, LONG)], padding=5)
    assert torch.equal(together[1:], whole)
    assert torch.equal(together[:1], decoder.prefill([Chunk(1, 0, PROMPT)]))


def mixed_and_separate(decoder: Harness) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of four live decode tokens of a bucket of six and of two chunks, [6, vocab]: in one
    step, and from a decode step and a prefill step over the same rows.
    """
    for row in (1, 2, 3, 4, 6):
        decoder.prefill([Chunk(row, 0, LONG[: 8 * row])])
    decodes = [Chunk(row, 8 * row, [row]) for row in (1, 2, 3, 4)]
    chunks = [Chunk(5, 0, PROMPT[:20]), Chunk(6, 48, LONG[48:70])]
    bucket = [decodes[0], DEAD, *decodes[1:], DEAD]
    mixed = decoder.mixed(bucket, chunks, padding=3)[[0, 2, 3, 4, 6, 7]]
    return mixed, torch.cat([decoder.step(StepKind.DECODE, decodes), decoder.prefill(chunks)])


@PAGE_SIZES
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_has_the_same_bits_in_a_mixed_step(device: str, page_size: int) -> None:
    """Of a model whose linears all have Hopper kernels, so that all steps are fused."""
    name = "llama-6-2-64-tied"
    sizes = {"rows": 6, "max_len": len(LONG), "max_step_tokens": len(LONG), "page_size": page_size}
    decoder = harness(name, device, torch.bfloat16, hopper=True, plan=exact_plan(name), **sizes)
    mixed, separate = mixed_and_separate(decoder)
    assert torch.equal(mixed, separate)


@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_cpu_a_fused_mixed_step_changes_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photon_ext, "hopper_runs", lambda: True)
    sizes = {"rows": 6, "max_len": len(LONG), "max_step_tokens": len(LONG)}
    fused, _ = mixed_and_separate(harness(name, "cpu", torch.float32, hopper=True, **sizes))
    plain, _ = mixed_and_separate(harness(name, "cpu", torch.float32, hopper=False, **sizes))
    assert torch.equal(fused, plain)


@pytest.mark.gpu
@PAGE_SIZES
def test_a_captured_mixed_step_follows_the_counts(page_size: int) -> None:
    """One graph serves every share of decode tokens and chunks."""
    sizes = {"rows": 6, "max_len": len(LONG), "max_step_tokens": len(LONG)}
    sizes["page_size"] = page_size
    eager, captured = (
        harness("qwen3-4-2-128", "cuda", torch.bfloat16, hopper=True, **sizes) for _ in range(2)
    )
    for one in (eager, captured):
        for row in (1, 2, 3):
            one.prefill([Chunk(row, 0, PROMPT[:8])])
    steps = [
        ([Chunk(1, 8, [5]), Chunk(2, 8, [6]), DEAD], [Chunk(4, 0, PROMPT[:5])]),
        ([Chunk(1, 9, [5]), DEAD, DEAD], [Chunk(4, 5, PROMPT[5:10])]),
        ([DEAD, DEAD, DEAD], [Chunk(4, 10, PROMPT[10:15])]),
        ([Chunk(1, 10, [7]), Chunk(2, 9, [8]), Chunk(3, 8, [9])], [Chunk(5, 0, PROMPT[:5])]),
    ]
    tensors = [captured.make_step(StepKind.MIXED, [*d, *c], 0, len(d)) for d, c in steps]
    step, graph = tensors[0], torch.cuda.CUDAGraph()
    captured.decoder.forward(step)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.decoder.forward(step)
    for (decodes, chunks), source in zip(steps, tensors, strict=True):
        step.decode_meta.copy_(source.decode_meta)
        step.segments.copy_(source.segments)
        step.counts.copy_(source.counts)
        graph.replay()
        live = [i for i, chunk in enumerate([*decodes, *chunks]) if chunk is not DEAD]
        assert step.logits is not None
        assert torch.equal(step.logits[live], eager.mixed(decodes, chunks)[live])


@pytest.mark.parametrize("device", DEVICES)
def test_through_torch_go_the_layers_of_a_long_chunk_and_not_its_head(
    device: str, products: list[torch.Size]
) -> None:
    exact = harness("llama-6-2-64-tied", device, torch.bfloat16, hopper=True).prefill(
        [Chunk(1, 0, PROMPT)]
    )
    plan = KernelPlan(hopper=True, decode=ExecutionModes(1, 1), chunks=ExecutionModes(1, 1))
    decoder = harness("llama-6-2-64-tied", device, torch.bfloat16, hopper=True, plan=plan)
    logits = decoder.prefill([Chunk(1, 0, PROMPT)])
    assert len(products) == 4 * decoder.decoder.config.layers
    assert (logits - exact).norm() < 0.05 * exact.norm()
    decoder.decode([1], [len(PROMPT)], [7])
    assert len(products) == 4 * decoder.decoder.config.layers


@pytest.mark.parametrize("device", DEVICES)
def test_through_torch_go_the_layers_of_a_wide_decode_step_and_its_head(
    device: str, products: list[torch.Size]
) -> None:
    count = NARROW_BATCH_TOKENS + 2
    rows = [*range(1, count + 1)]

    def logits(exact: bool, batch: int) -> torch.Tensor:
        decoder = harness(
            "llama-6-2-64-tied",
            device,
            torch.bfloat16,
            hopper=True,
            rows=count,
            max_step_tokens=4 * count,
            exact=exact,
        )
        for row in rows:
            decoder.prefill([Chunk(row, 0, PROMPT[row % 7 :][:3])])
        products.clear()
        return decoder.decode(rows[:batch], [3] * batch, [*range(batch)])

    exact = logits(True, count)
    assert not products
    through_torch = device == "cuda" and hopper_runs()
    wide = logits(False, count)
    assert len(products) == (4 * 2 + 1) * through_torch
    assert (wide - exact).norm() < 0.05 * exact.norm()
    for batch in (LEAST_BATCH_TOKENS, FUSED_TOKENS, FUSED_TOKENS + 1, NARROW_BATCH_TOKENS):
        own = logits(False, batch)
        assert len(products) == 1 * through_torch  # the head
        assert (own - exact[:batch]).norm() < 0.05 * exact[:batch].norm()
    few = LEAST_BATCH_TOKENS - 1
    assert torch.equal(logits(False, few), exact[:few])
    assert not products


@pytest.mark.parametrize("device", DEVICES)
def test_a_batchs_linears_serve_decode_rows_chunks_and_both(
    device: str, products: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer ends in two norms; bias and norms of q and k included."""
    called, op = [], ops.linear_norm_into
    monkeypatch.setattr(
        ops, "linear_norm_into", lambda *a, **options: called.append(len(a[0])) or op(*a, **options)
    )
    modes = ExecutionModes(FUSED_TOKENS, FUSED_TOKENS, BATCH_TOKENS)
    plan, count = KernelPlan(hopper=True, decode=modes, chunks=modes), LEAST_BATCH_TOKENS + 1
    for name in ("llama-6-2-64-tied", "llama-7-1-96-biased", "qwen3-4-2-128"):
        sizes = {"rows": count, "max_step_tokens": BATCH_TOKENS}
        exact = harness(name, device, torch.bfloat16, hopper=True, **sizes)
        batch = harness(name, device, torch.bfloat16, hopper=True, plan=plan, **sizes)
        rows = [*range(1, count)]
        steps = []
        for decoder in (exact, batch):
            prompts = decoder.prefill([Chunk(row, 0, PROMPT[row % 7 :][:2]) for row in rows])
            decoded = decoder.decode(rows, [2] * len(rows), rows)
            mixed = decoder.mixed(
                [Chunk(row, 3, [row]) for row in rows[:3]], [Chunk(count, 0, PROMPT)]
            )
            steps.append([prompts, decoded, mixed])
        layers = exact.decoder.config.layers
        assert called == [66] * 2 * layers + [33] * 2 * layers + [43] * 2 * layers
        called.clear()
        for one, other in zip(*steps, strict=True):
            assert (one - other).norm() < 0.05 * one.norm()
    assert products == [torch.Size([33, 131])] * 6  # the heads of prompts and of decode rows


@pytest.mark.parametrize(
    "modes",
    [ExecutionModes(FUSED_TOKENS, FUSED_TOKENS, BATCH_TOKENS), ExecutionModes(1, 1)],
    ids=["a batch's linears", "torch"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_attention_of_a_batch_serves_decode_rows_alone_and_beside_chunks(
    device: str, modes: ExecutionModes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, op = [], ops.fused_attention_decode_into
    monkeypatch.setattr(
        ops,
        "fused_attention_decode_into",
        lambda *a, **options: asked.append((len(a[1]), options["batch"])) or op(*a, **options),
    )
    count = LEAST_BATCH_TOKENS + 1
    plan = KernelPlan(
        hopper=True, decode=modes, chunks=modes, balanced_attention=True, batch_attention=True
    )
    sizes = {"rows": count, "max_step_tokens": BATCH_TOKENS}
    rows, steps = [*range(1, count)], []
    for options in ({}, {"plan": plan}):
        asked.clear()
        decoder = harness("qwen3-4-2-128", device, torch.bfloat16, hopper=True, **sizes, **options)
        decoder.prefill([Chunk(row, 0, PROMPT[row % 7 :][:2]) for row in rows])
        decoded = decoder.decode(rows, [2] * len(rows), rows)
        mixed = decoder.mixed([Chunk(row, 3, [row]) for row in rows], [Chunk(count, 0, PROMPT)])
        steps.append([decoded, mixed])
    assert asked == [(len(rows), True)] * 2 * decoder.decoder.config.layers
    for exact, batch in zip(*steps, strict=True):
        assert (exact - batch).norm() < 0.05 * exact.norm()


@pytest.mark.gpu
def test_chunks_of_few_tokens_are_exact_and_longer_ones_torchs_captured_or_not(
    products: list[torch.Size],
) -> None:
    if not hopper_runs():
        pytest.skip("the Hopper kernels do not run on this GPU")
    ids = 2 * LONG
    assert len(ids) > NARROW_BATCH_TOKENS
    sizes = {"max_len": len(ids), "max_step_tokens": len(ids)}
    exact = harness("llama-6-2-64-tied", "cuda", torch.bfloat16, hopper=True, **sizes)
    usual = harness("llama-6-2-64-tied", "cuda", torch.bfloat16, hopper=True, **sizes, exact=False)
    short, whole = [Chunk(1, 0, ids[: LEAST_BATCH_TOKENS - 1])], [Chunk(1, 0, ids)]
    assert torch.equal(usual.prefill(short), exact.prefill(short))
    assert not products
    expected = usual.prefill(whole)
    assert len(products) == 4 * usual.decoder.config.layers
    step, graph = usual.make_step(StepKind.PREFILL, whole), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        usual.decoder.forward(step)
    graph.replay()
    assert step.logits is not None
    assert (step.logits - expected).norm() < 0.02 * expected.norm()
    assert (expected - exact.prefill(whole)).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [1, 255, 256, 257, 1800, 2049, 3298])
def test_without_torchs_products_no_bit_depends_on_how_a_long_prompt_is_cut(cut: int) -> None:
    """Chunks that fill the device, and chunks of few tokens, over a context of many parts."""
    config, count = CONFIGS["llama-6-2-64-tied"], 3300
    weights = harness("llama-6-2-64-tied", "cuda", torch.bfloat16, hopper=True).decoder.weights
    decoder = Harness(
        config, weights, max_len=count, exact=True, hopper=True, rows=2, max_step_tokens=count
    )
    tokens = [(7 * i + i // 50) % config.vocab for i in range(count)]
    whole = decoder.prefill([Chunk(1, 0, tokens)])
    for begin, end in ((0, cut), (cut, cut + 1)):
        decoder.prefill([Chunk(2, begin, tokens[begin:end])])
    assert torch.equal(decoder.prefill([Chunk(2, cut + 1, tokens[cut + 1 :])]), whole)
