"""Steps of a model in fp8, int4 and a GGUF file's mixture that are fused by Hopper kernels, against
the same numbers in float32; needs neither transformers nor files.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from photon_ext import hopper_runs, reference
from photon_ext.dequantize import dequantized
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.kernel_plan import ExecutionMode, ExecutionModes, KernelPlan
from photon_ext.models.layers import projection
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.requantize import in_groups, requantized
from photon_ext.models.shapes import in_fp8, in_q4_k_m
from photon_ext.models.weights import (
    DecoderWeights,
    empty_weights,
    other_slots,
    random_weights,
    weight_modules,
)
from photon_ext.weight_format import WeightFormat
from tests.models.harness import Chunk, Harness

pytestmark = pytest.mark.emulated
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIGS = {
    "fp8": ModelConfig(Family.QWEN3, 256, 2, 4, 2, 64, 384, 136),
    "int4": ModelConfig(Family.LLAMA, 512, 2, 4, 2, 64, 768, 136, qkv_bias=True),
    "q4_k_m": ModelConfig(Family.LLAMA, 256, 2, 4, 2, 64, 512, 136, qkv_bias=True),
}
ROWS = 20
TEXTS = [[(7 * row + 3 * i) % 131 for i in range(1 + row)] for row in range(ROWS)]


@cache
def stored(form: str) -> tuple[ModelConfig, DecoderWeights]:
    plain = CONFIGS[form]
    config = in_groups(in_q4_k_m(plain)) if form == "q4_k_m" else requantized(plain, form)
    return config, random_weights(config)


def on(device: str, form: str) -> tuple[ModelConfig, DecoderWeights]:
    """Of q4_k_m the second layer's values have more bits: q, k and v are two weights there."""
    config, weights = stored(form)
    counts = [len(layer.attention.qkv.weights) for layer in weights.layers]
    assert counts == ([1, 2] if form == "q4_k_m" else [1, 1])
    return config, weights if device == "cpu" else random_weights(config, device=device)


def decoded(weights: DecoderWeights, plain: ModelConfig) -> DecoderWeights:
    """The same numbers in float32, on the CPU; `plain`: the model without formats."""
    made = empty_weights(plain, torch.float32, "cpu")
    for (_, to), (_, weight) in zip(weight_modules(made), weight_modules(weights), strict=True):
        is_dense = weight.format is WeightFormat.DENSE
        to.data.copy_(weight.data if is_dense else dequantized(weight))
    for (_, slot), (_, values) in zip(other_slots(made), other_slots(weights), strict=True):
        slot.copy_(values)
    return made


def logits_of(decoder: Harness, rows: list[int], step: int = ROWS) -> torch.Tensor:
    """Of a decode token of each row behind its text, `step` rows at a time."""
    parts = [rows[i : i + step] for i in range(0, len(rows), step)]
    found = [
        decoder.decode([row + 1 for row in part], [len(TEXTS[row]) for row in part], part)
        for part in parts
    ]
    return torch.cat(found).cpu()


def filled(decoder: Harness) -> Harness:
    for row, text in enumerate(TEXTS):
        decoder.prefill([Chunk(row + 1, 0, text)])
    return decoder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", CONFIGS)
def test_fused_steps_of_stored_weights_are_as_near_to_float32_as_op_by_op(
    form: str, device: str
) -> None:
    config, weights = on(device, form)
    numbers = Harness(CONFIGS[form], decoded(weights, CONFIGS[form]), rows=ROWS)
    exact = logits_of(filled(numbers), [*range(ROWS)])
    plain, ours = (
        filled(Harness(config, weights, hopper=hopper, exact=True, rows=ROWS))
        for hopper in (False, True)
    )
    if hopper_runs():
        assert ours.decoder.plan.decode.of(ROWS) is ExecutionMode.FUSED
    rounded = (logits_of(plain, [*range(ROWS)]).float() - exact).norm()
    assert rounded > 0
    assert (logits_of(ours, [*range(ROWS)]).float() - exact).norm() < 1.5 * rounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", CONFIGS)
def test_a_batchs_linears_are_as_near_as_torchs_products_of_decoded_weights(
    form: str, device: str
) -> None:
    """Layers and head; both round the numbers of weights to bfloat16."""
    config, weights = on(device, form)
    numbers = Harness(CONFIGS[form], decoded(weights, CONFIGS[form]), rows=ROWS)
    exact = logits_of(filled(numbers), [*range(ROWS)])
    batch, torchs = (
        filled(Harness(config, weights, rows=ROWS, plan=KernelPlan(True, modes, modes)))
        for modes in (ExecutionModes(0, 0, 64, 1), ExecutionModes(0, 0))
    )
    rounded = (logits_of(torchs, [*range(ROWS)]).float() - exact).norm()
    assert rounded > 0
    assert (logits_of(batch, [*range(ROWS)]).float() - exact).norm() < 1.5 * rounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", CONFIGS)
def test_a_row_of_a_model_in_fewer_bits_has_the_same_bits_in_every_batch(
    form: str, device: str
) -> None:
    config, weights = on(device, form)
    decoder = filled(Harness(config, weights, hopper=True, exact=True, rows=ROWS))
    together = logits_of(decoder, [*range(ROWS)])
    for step in (1, 3, 9):
        assert torch.equal(logits_of(decoder, [*range(ROWS)], step), together)


def adapted(config: ModelConfig, weights: DecoderWeights, hopper: bool = False) -> Harness:
    """With one adapter, of rows with odd numbers."""
    shape = LoraShape(config, 4)
    memory = torch.randn(shape.words, generator=torch.Generator().manual_seed(5))
    lora = LoraSlots(shape, 1, 64, weights.dtype, weights.device)
    lora.load(1, (0.05 * memory).to(weights.dtype)).wait()
    decoder = Harness(config, weights, hopper=hopper, exact=True, rows=ROWS, lora=lora)
    decoder.slots = dict.fromkeys(range(1, ROWS + 1, 2), 1)
    return filled(decoder)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_are_added_to_the_output_of_two_weights(device: str) -> None:
    config, weights = on(device, "q4_k_m")
    rows = [*range(6)]
    exact = logits_of(adapted(CONFIGS["q4_k_m"], decoded(weights, CONFIGS["q4_k_m"])), rows)
    plain, ours = (
        logits_of(adapted(config, weights, hopper), rows).float() for hopper in (False, True)
    )
    rounded = (plain - exact).norm()
    assert rounded > 0
    assert (ours - exact).norm() < 1.5 * rounded
    without = logits_of(filled(Harness(config, weights, rows=ROWS)), rows).float()
    assert (without - exact).norm() > 4 * rounded


# --- tokens in fp8 --------------------------------------------------------------------------------


def rounded_tokens(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *others: object, **more: object
) -> None:
    """linear_into of x in fp8, in float32."""
    tokens = Fp8Tokens(torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x)))
    reference.quantize_fp8_into(tokens, x)
    out.copy_((tokens.data.float() * tokens.scale[:, None]) @ weight.data.T)


MODES = {"batch": ExecutionModes(0, 0, 64, 1), "torch": ExecutionModes(0, 0)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_in_fp8_lose_what_rounding_them_loses(
    mode: str, blocks: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks torch multiplies decoded weights by tokens as they are."""
    plain = replace(CONFIGS["fp8"], q_heads=2) if blocks else CONFIGS["fp8"]
    config = in_fp8(plain) if blocks else requantized(plain, "fp8")
    weights = random_weights(config, device=device)
    numbers = decoded(weights, plain)
    exact = logits_of(filled(Harness(plain, numbers, rows=ROWS)), [*range(ROWS)])
    with monkeypatch.context() as patch:
        patch.setattr(projection.ops, "linear_into", rounded_tokens)
        expected = logits_of(filled(Harness(plain, numbers, rows=ROWS)), [*range(ROWS)])
    modes = MODES[mode]
    ours, wide = (
        logits_of(filled(Harness(config, weights, rows=ROWS, plan=plan)), [*range(ROWS)])
        for plan in (
            KernelPlan(True, modes, modes, fp8_activations=True),
            KernelPlan(True, modes, modes),
        )
    )
    loss = (expected - exact).norm()
    own, without = ((one.float() - exact).norm() for one in (ours, wide))
    assert loss > 3 * without
    if mode == "torch" and blocks:
        assert torch.equal(ours, wide)  # also of one block of columns, which o has here
    else:
        assert 0.7 * loss < own < 1.5 * loss
