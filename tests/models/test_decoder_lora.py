"""The forward with adapters: near that of merged weights, in every kind of step and on every
device; needs neither transformers nor files.
"""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.weights import DecoderWeights, empty_weights, random_weights, weight_slots
from tests.models.harness import DEAD, Chunk, Harness

pytestmark = pytest.mark.emulated
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# widths that the Hopper kernels take, and a query part that is no multiple of the others
CONFIG = ModelConfig(Family.QWEN3, 192, 2, 6, 2, 64, 320, 131, tied_embeddings=True)
RANK, SLOTS = 4, 3
PROMPT = [(7 * i) % 131 for i in range(40)]
LONG = [(5 * i + i // 7) % 131 for i in range(150)]  # more than the Hopper kernels take at once


def made(dtype: torch.dtype, device: str) -> DecoderWeights:
    """Random weights that are bfloat16's, ten times larger than those of benchmarks."""
    weights, source = empty_weights(CONFIG, dtype, device), random_weights(CONFIG, torch.float32)
    pairs = zip(weight_slots(weights), weight_slots(source), strict=True)
    for (name, slot), (_, values) in pairs:
        slot.copy_((values if name.endswith("norm.weight") else 10 * values).bfloat16())
    return weights


def adapters(dtype: torch.dtype) -> list[torch.Tensor]:
    """Three of them as slots hold them, large enough to show."""
    shape = LoraShape(CONFIG, RANK)
    found = []
    for seed in range(SLOTS):
        memory = torch.zeros(shape.words)
        generator = torch.Generator().manual_seed(seed)
        for layer in shape.views(memory):
            for a, b in layer.values():
                a.normal_(0, a.shape[-1] ** -0.5, generator=generator)
                b.normal_(0, 0.3, generator=generator)
        found.append(memory.bfloat16().to(dtype))
    return found


def merged(slot: int) -> DecoderWeights:
    """The float32 weights with an adapter."""
    weights, shape = made(torch.float32, "cpu"), LoraShape(CONFIG, RANK)
    views = shape.views(adapters(torch.float32)[slot - 1])
    for layer, pairs in zip(weights.layers, views, strict=True):
        for name, projection in layer.projections().items():
            a, b = pairs[name]
            parts = zip(b.split(projection.shape.rows), a.split(shape.rank), strict=True)
            projection.weight.data.add_(torch.cat([rows @ down for rows, down in parts]))
    return weights


def harness(device: str, dtype: torch.dtype, hopper: bool) -> Harness:
    """A decoder with the three adapters; rows 1 to 3 have theirs, row 4 has none."""
    weights = made(dtype, device)
    lora = LoraSlots(LoraShape(CONFIG, RANK), SLOTS, 256, dtype, weights.device)
    for slot, memory in enumerate(adapters(dtype), 1):
        lora.load(slot, memory).wait()
    decoder = Harness(
        CONFIG, weights, 256, exact=True, hopper=hopper, max_step_tokens=256, lora=lora
    )
    decoder.slots = {1: 1, 2: 2, 3: 3}
    return decoder


def all_steps(decoder: Harness, rows: list[int]) -> torch.Tensor:
    """Logits of these rows in a prefill, a decode and a mixed step, [steps, rows, vocab]."""
    found = [decoder.prefill([Chunk(row, 0, PROMPT[:row]) for row in rows])]
    found.append(decoder.decode(rows, rows, [5] * len(rows), padding=2))
    chunks = [Chunk(row, row + 1, LONG[: 7 * row]) for row in rows[1:]]
    found.append(
        decoder.mixed([Chunk(rows[0], rows[0] + 1, [9]), DEAD], chunks)[
            [0, *range(2, len(rows) + 1)]
        ]
    )
    return torch.stack(found).float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_near_the_model_with_its_adapter_merged(
    device: str, hopper: bool, dtype: torch.dtype
) -> None:
    rows = [1, 2, 3, 4]
    ours = all_steps(harness(device, dtype, hopper), rows)
    plain = Harness(CONFIG, made(torch.float32, "cpu"), 256, max_step_tokens=256)
    without = all_steps(plain, rows)
    for index, row in enumerate(rows):
        weights = merged(row) if row < 4 else made(torch.float32, "cpu")
        exact = all_steps(Harness(CONFIG, weights, 256, max_step_tokens=256), rows)[:, index]
        error = (ours[:, index] - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype is torch.float32 else 0.06)
        away = (without[:, index] - exact).norm() / exact.norm()
        assert away > 0.3 if row < 4 else away == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hopper", [False, True])
def test_rows_have_the_same_bits_whatever_adapters_ride_along(device: str, hopper: bool) -> None:
    """A row alone, beside others, in a long chunk; a row without adapter also in a step without."""
    decoder = harness(device, torch.bfloat16, hopper)
    for row in (1, 2, 3, 4):
        decoder.prefill([Chunk(row, 0, LONG)])
    prefilled = {row: decoder.context(row, len(LONG)).clone() for row in (1, 4)}
    together = decoder.decode([4, 1, 2, 3], [150] * 4, [7] * 4)
    for index, row in enumerate([4, 1, 2, 3]):
        assert torch.equal(decoder.decode([row], [150], [7])[0], together[index])
    for begin in range(0, 150, 50):
        chunk = LONG[begin : begin + 50]
        decoder.prefill([Chunk(row, begin, chunk) for row in (1, 4)])
    for row in (1, 4):
        assert torch.equal(decoder.context(row, 50), prefilled[row][:, :50])
    decoder.prefill([Chunk(4, 0, LONG)])
    decoder.slots = {}
    decoder.prefill([Chunk(4, 0, LONG)])
    assert torch.equal(decoder.context(4, len(LONG)), prefilled[4])
    assert torch.equal(decoder.decode([4], [150], [7])[0], together[0])


def test_a_step_without_adapters_calls_none_of_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = harness("cpu", torch.float32, hopper=True)
    decoder.slots = {}

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("an op of adapters was called")

    for name in ("lora_shrink_into", "lora_expand_", "lora_link_"):
        monkeypatch.setattr(ops, name, refuse)
    all_steps(decoder, [1, 2, 3])
