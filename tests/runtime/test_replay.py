"""Captured steps at lengths far from those they were captured at, and pinned memory that is
poisoned while its slot is free.
"""

from __future__ import annotations

from array import array

import pytest
import torch

from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import KernelPlan
from photon_ext.models.weights import DecoderWeights, empty_weights, random_weights, weight_slots
from photon_ext.runtime import Pipeline, RowParams, Runtime
from photon_ext.runtime.slot import Slot

CONFIG = ModelConfig(Family.QWEN3, 48, 2, 6, 2, 24, 40, 97)
PAGE, MAX_LEN, ROWS = 5, 60, 4
PAGES_PER_ROW = MAX_LEN // PAGE
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def weights_on(device: str) -> DecoderWeights:
    """Random weights of a size that sets logits apart, the same on every device."""
    source, weights = (
        random_weights(CONFIG, torch.float32),
        empty_weights(CONFIG, torch.float32, device),
    )
    for (name, slot), (_, values) in zip(weight_slots(weights), weight_slots(source), strict=True):
        slot.copy_(values if name.endswith("norm.weight") else 10 * values)
    return weights


def make(device: str, depth: int, **options: object) -> Pipeline:
    decoder = Decoder(
        CONFIG,
        weights_on(device),
        64,
        ROWS,
        MAX_LEN,
        PAGE,
        ROWS * PAGES_PER_ROW,
        plan=KernelPlan(),
    )
    runtime = Runtime(max_rows=ROWS, max_len=MAX_LEN, depth=depth, device=device, page_size=PAGE)
    return Pipeline(
        runtime,
        decoder.forward,
        vocab_size=CONFIG.vocab,
        buckets=(1, 2),
        **{"chunk": 16, **options},
    )


def allow_all(row: object, words: memoryview) -> None:
    words[:] = array("i", [-1] * len(words))


def tokens_of(
    pipeline: Pipeline, lengths: list[int], new_tokens: int, constrained: bool = False
) -> list[list[int]]:
    rows = []
    for i, length in enumerate(lengths):
        prompt = [(7 * i + 3 * j) % CONFIG.vocab for j in range(length)]
        cap = min(new_tokens, MAX_LEN + 1 - length)
        pages = range(i * PAGES_PER_ROW, (i + 1) * PAGES_PER_ROW)
        rows.append(pipeline.admit(prompt, RowParams(cap, constrained=constrained), pages))
    found: dict[object, list[int]] = {row: [] for row in rows}
    while pipeline.busy:
        for event in pipeline.tick(allow_all):
            assert event.error is None
            found[event.row] += event.tokens
    return [found[row] for row in rows]


@DEVICES
@pytest.mark.parametrize("constrained", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("depth", [1, 2])
def test_hazard_20_and_i10_every_graph_serves_every_length(
    device: str, depth: int, constrained: bool
) -> None:
    """All buckets, slots and halves, from position 0 over page edges to the last place; captured
    on dead rows, equal to eager steps.
    """
    captured = make(device, depth, prefill_buckets=(1, 4, 16))
    eager = make(device, 1, graph=False)
    for lengths in (
        [1],
        [PAGE - 1, PAGE],
        [PAGE + 1, 2 * PAGE, 1],
        [MAX_LEN, MAX_LEN - 1, MAX_LEN - 7, 33],
    ):
        expected = tokens_of(eager, lengths, MAX_LEN)
        assert tokens_of(captured, lengths, MAX_LEN, constrained) == expected


@pytest.mark.emulated
@DEVICES
@pytest.mark.parametrize("graph", [True, False])
def test_hazard_1_pinned_memory_of_a_free_slot_may_hold_anything(
    device: str, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisons a slot's pinned input, masks and records once its step is committed: nobody may
    read them again.
    """
    expected = tokens_of(make(device, 2, graph=graph), [3, 20, 9], 12, constrained=True)
    wait = Slot.wait

    def wait_and_poison(slot: Slot, segments: int) -> memoryview:
        records = memoryview(array("i", wait(slot, segments)))
        slot._segments = None  # what is staged is gone: stage it again
        for view in (slot._input, slot._output, slot._mask):
            view[:] = array("i", [0x5EADBEEF] * len(view))
        return records

    monkeypatch.setattr(Slot, "wait", wait_and_poison)
    assert tokens_of(make(device, 2, graph=graph), [3, 20, 9], 12, constrained=True) == expected


def test_hazard_19_ten_thousand_steps_on_the_host_leave_nothing_behind() -> None:
    import gc

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    pipeline = make("cpu", 2)
    tokens_of(pipeline, [1, 2, 3], 20)
    before = objects()
    steps = pipeline.stats.steps
    while pipeline.stats.steps < steps + 10_000:
        tokens_of(pipeline, [1, 2, 3], MAX_LEN)
    assert objects() - before < 50
