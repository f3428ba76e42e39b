"""Layers as data: the ops by which each execution mode runs one, and settings of single layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from photon_ext import ops
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import ALL, ExecutionModes, KernelPlan
from photon_ext.models.layers.block import Block
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.projections import BATCH_OPS, FUSED_OPS, Epilogue, layer_projections
from photon_ext.models.weights import DecoderWeights, random_weights
from tests.models.harness import Chunk, Harness

CONFIG = ModelConfig(Family.QWEN3, 64, 2, 4, 2, 16, 96, 131)
MODES = {
    "op by op": ExecutionModes(),
    "torch": ExecutionModes(own_tokens=0),
    "fused": ExecutionModes(fused_tokens=ALL),
    "batch": ExecutionModes(fused_tokens=ALL, batch_tokens=64),
}
TOKENS = 33  # as many as a batch's linears ask for


@contextmanager
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops that are called meanwhile, by name."""
    names: list[str] = []

    def record(module: object, name: str) -> None:
        op = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, **named: (names.append(name), op(*given, **named))[1]
        )

    with monkeypatch.context():
        for name in vars(ops):
            if re.fullmatch(r"[a-z].*(_into|_)", name):
                record(ops, name)
        record(torch, "mm")
        yield names


def lora(slots: int) -> LoraSlots:
    shape = LoraShape(CONFIG, 8)
    return LoraSlots(shape, slots, TOKENS, torch.bfloat16, torch.device("cpu"))


def ops_of_a_decode_step(
    monkeypatch: pytest.MonkeyPatch, modes: ExecutionModes, adapters: bool = False
) -> list[str]:
    plan = KernelPlan(hopper=True, decode=modes)
    sizes = {"rows": TOKENS, "max_step_tokens": TOKENS, "max_len": 8}
    slots = lora(1) if adapters else None
    weights = random_weights(CONFIG, torch.bfloat16)
    harness = Harness(CONFIG, weights, plan=plan, lora=slots, **sizes)
    harness.slots = {1: 1} if adapters else {}
    with called(monkeypatch) as names:
        harness.decode([*range(1, TOKENS + 1)], [0] * TOKENS, [5] * TOKENS)
    assert names[:2] == ["decode_meta_set_", "embedding_into"]
    return names[2:]


ATTENTION = "fused_attention_decode_into"
NORM, ADD_NORM = "rms_norm_into", "add_rms_norm_into"
UNFUSED = ["linear", ATTENTION, "linear", ADD_NORM, "linear", "silu_mul_into", "linear", ADD_NORM]
NORM_LINEAR, RESIDUAL, LINK = "norm_linear_into", "linear_residual_", "lora_link_"
EXPECTED = {
    "op by op": [NORM, *UNFUSED * 2, "linear"],
    "torch": [NORM, *UNFUSED * 2, "linear"],
    "fused": [*[NORM_LINEAR, ATTENTION, RESIDUAL, "norm_swiglu_into", RESIDUAL] * 2, NORM_LINEAR],
    "batch": [
        NORM,
        *["linear_into", ATTENTION, "linear_norm_into", "swiglu_into", "linear_norm_into"] * 2,
        "mm",  # the head
    ],
}  # fmt: skip
LINEAR = {"op by op": "linear_into", "torch": "mm"}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_runs_a_layer_by_its_own_ops(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [LINEAR[mode] if name == "linear" else name for name in EXPECTED[mode]]
    assert ops_of_a_decode_step(monkeypatch, MODES[mode]) == expected


@pytest.mark.parametrize(("mode", "named"), [("fused", FUSED_OPS), ("batch", BATCH_OPS)])
def test_a_plan_asks_about_the_ops_that_run(mode: str, named: dict[Epilogue, str]) -> None:
    epilogues = [one.epilogue for one in layer_projections(CONFIG).values()]
    *linears, _head = [name for name in EXPECTED[mode] if name not in (NORM, ATTENTION)]
    assert linears == [named[epilogue] for epilogue in epilogues] * CONFIG.layers


def test_adapters_stand_around_each_linear_or_between_fused_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head has none; steps with adapters go past a batch's linears."""
    around = ["lora_shrink_into", "linear_into", "lora_expand_"]
    unfused = [each for name in UNFUSED for each in (around if name == "linear" else [name])]
    found = ops_of_a_decode_step(monkeypatch, MODES["op by op"], adapters=True)
    assert found == [NORM, *unfused * 2, "linear_into"]
    attention = [NORM_LINEAR, LINK, ATTENTION, LINK, RESIDUAL, LINK]
    fused = [LINK, *[*attention, NORM_LINEAR, LINK, RESIDUAL, LINK] * 2, NORM_LINEAR]
    for mode in ("fused", "batch"):
        assert ops_of_a_decode_step(monkeypatch, MODES[mode], adapters=True) == fused


def test_projections_alone_call_linear_ops() -> None:
    """So that a format of weights, or a sum over GPUs, has one place; tokens in fp8 have theirs."""
    models = Path(ops.__file__).parent / "models"
    linear = re.compile(r"ops\.\w*(linear|swiglu|gemv|mlp)\w*_(into)?\(|torch\.(mm|addmm)\(")
    found = {path for path in models.rglob("*.py") if linear.search(path.read_text())}
    assert found == {models / "layers/projection.py", models / "layers/fp8_execution.py"}


# --- settings of one layer ------------------------------------------------------------------------


def changed(weights: DecoderWeights, layer: int, **settings: object) -> DecoderWeights:
    """With these settings of attention in one layer."""
    layers: list[Block] = list(weights.layers)
    attention = replace(layers[layer].attention, **settings)
    layers[layer] = replace(layers[layer], attention=attention)
    return replace(weights, layers=tuple(layers))


SMALL = ModelConfig(Family.LLAMA, 64, 2, 4, 2, 16, 96, 131)
TEXT = [3, 9, 27, 81, 112]


def sharp(config: ModelConfig) -> DecoderWeights:
    """Random weights, large enough that attention shows."""
    weights = random_weights(config, torch.float32)
    for tensor in weights.tensors():
        tensor.mul_(1 if tensor.dim() == 1 else 10)
    return weights


def logits_of(
    weights: DecoderWeights, hopper: bool, ids: list[int] = TEXT, config: ModelConfig = SMALL
) -> torch.Tensor:
    """Of all but the last two tokens as a chunk, and of the others one by one, [3, vocab]."""
    harness = Harness(config, weights, hopper=hopper)
    first = harness.prefill([Chunk(1, 0, ids[:-2])])
    others = [harness.decode([1], [at], [ids[at]]) for at in (len(ids) - 2, len(ids) - 1)]
    return torch.cat([first, *others])


@pytest.mark.parametrize("hopper", [False, True])
def test_the_scale_of_attention_is_the_layers_own(hopper: bool) -> None:
    """Half of it does what queries of half the size do."""
    weights = sharp(SMALL)
    halved = changed(weights, 1, scale=weights.layers[1].attention.scale / 2)
    scaled = logits_of(halved, hopper)
    assert not torch.equal(scaled, logits_of(weights, hopper))
    weights.layers[1].attention.qkv.weight.data[: SMALL.q_size] /= 2
    assert torch.equal(scaled, logits_of(weights, hopper))


@pytest.mark.parametrize("hopper", [False, True])
def test_a_layer_that_does_not_rotate_knows_no_order(hopper: bool) -> None:
    config = replace(SMALL, layers=1)
    weights, others = sharp(config), [TEXT[1], TEXT[0], *TEXT[2:]]
    still = changed(weights, 0, rotates=False)
    pairs = {
        model: [logits_of(each, hopper, ids, config) for ids in (TEXT, others)]
        for model, each in {"rotates": weights, "still": still}.items()
    }
    torch.testing.assert_close(*pairs["still"], atol=1e-5, rtol=1e-5)
    assert (pairs["rotates"][0] - pairs["rotates"][1]).abs().max() > 1e-2


def test_some_layers_may_rotate_and_others_not() -> None:
    weights = sharp(SMALL)
    found = [logits_of(changed(weights, layer, rotates=False), False) for layer in (0, 1)]
    found.append(logits_of(weights, False))
    assert all((one - other).abs().max() > 1e-3 for one, other in combinations(found, 2))
