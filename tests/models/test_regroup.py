"""Blocks of GGUF files in the formats that the Hopper kernels read: the same codes, scales that are
rounded to float16 once, and models that a loader fills with them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from photon_ext.block_codes import block_codes
from photon_ext.dequantize import dequantized
from photon_ext.errors import ModelError
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import gpu_target, kept_config, roomy_config, target_of
from photon_ext.models.layers.weight import empty_weight
from photon_ext.models.loading import loader, placing
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.gguf_weights import load_gguf_weights
from photon_ext.models.loading.loader import LoadedModel, config_in_memory, load_model
from photon_ext.models.loading.model_files import read_config
from photon_ext.models.loading.regroup import regrouped
from photon_ext.models.quantization import StoredFormat
from photon_ext.models.requantize import GROUPED, in_groups
from photon_ext.models.weights import check_weights, empty_weights, weight_modules
from photon_ext.weight_format import WeightFormat
from tests.cli.command import run
from tests.models.stored_gguf import FAMILIES, write_stored_gguf
from tests.models.test_gguf_stored import logits, mixed
from tests.ops.stored import Kind as StoredKind
from tests.ops.stored import random_weight

EXACT = (WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q5_0, WeightFormat.Q8_0)
ROUNDED = (WeightFormat.Q4_K, WeightFormat.Q6_K)
KindOf = Callable[[str], Kind | None]
H200 = gpu_target((9, 0))
# As llama.cpp mixes them, and all whose scales are rounded nowhere
Q4_K_M = mixed(
    o_proj=Kind.Q4_K, gate_proj=Kind.Q4_K, up_proj=Kind.Q4_K, down_proj=Kind.Q6_K, lm_head=Kind.Q6_K
)
OTHERS = mixed(
    q_proj=Kind.Q4_0,
    k_proj=Kind.Q8_0,
    v_proj=Kind.Q5_0,
    gate_proj=Kind.Q4_1,
    embed_tokens=Kind.Q8_0,
    lm_head=Kind.Q5_0,
)
WITH_HEAD = {**FAMILIES["qwen3"], "tie_word_embeddings": False, "vocab_size": 136}


# --- a weight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", EXACT, ids=str)
def test_blocks_with_a_scale_each_have_the_same_numbers_in_groups(form: WeightFormat) -> None:
    weight = random_weight(StoredKind(form), 9, 768)
    found = regrouped(weight)
    theirs = quants.dequantize(weight.data.numpy(), Kind[form.name])
    assert (found.format, found.n, found.k) == (GROUPED[form].format, 9, 768)
    assert torch.equal(dequantized(found), dequantized(weight))
    assert torch.equal(dequantized(found), torch.from_numpy(np.array(theirs)))


@pytest.mark.parametrize("form", ROUNDED, ids=str)
def test_scales_that_are_products_are_rounded_to_float16_and_codes_are_kept(
    form: WeightFormat,
) -> None:
    weight = random_weight(StoredKind(form), 9, 768)
    found, blocks = regrouped(weight), block_codes(weight)
    offset = None if blocks.offset is None else blocks.offset.half().float()
    nearest = blocks._replace(scale=blocks.scale.half().float(), offset=offset)
    assert torch.equal(dequantized(found), nearest.numbers().view(9, 768))
    theirs = torch.from_numpy(np.array(quants.dequantize(weight.data.numpy(), Kind[form.name])))
    error = (dequantized(found) - theirs).view_as(blocks.codes).abs()
    parts = blocks._replace(offset=None).numbers().abs()
    parts += 0 if blocks.offset is None else blocks.offset.abs()
    assert error.max() > 0
    assert bool((error <= 2.0**-11 * parts * (1 + 1e-5)).all())


@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_a_regrouped_weight_is_as_its_format_says(form: WeightFormat) -> None:
    stored, found = GROUPED[form], regrouped(random_weight(StoredKind(form), 3, 512))
    assert found.scale is not None
    assert found.scale.dtype is torch.float16
    assert found.scale.shape == stored.scale_shape(3, 512)
    assert found.scale.is_contiguous()
    assert (found.zero is None) == (not stored.offsets)
    assert found.zero is None or (found.zero.dtype, found.zero.shape) == (
        found.scale.dtype,
        found.scale.shape,
    )


@pytest.mark.parametrize(
    ("form", "at", "number", "told"),
    [
        (WeightFormat.Q4_K, 0, 60000.0, r"scale \d+"),
        (WeightFormat.Q4_K, 2, 60000.0, r"offset -\d+"),
        (WeightFormat.Q6_K, 208, -60000.0, r"scale -?\d"),
    ],
)
def test_a_scale_that_float16_does_not_hold_is_refused_with_its_row(
    form: WeightFormat, at: int, number: float, told: str
) -> None:
    """Of six bits each, or eight, that are not all small; in the file it is finite."""
    weight = random_weight(StoredKind(form), 300, 1024)
    block = weight.data.view(300, -1, form.bytes)[260, 2]
    block[at : at + 2] = torch.frombuffer(bytearray(struct.pack("<e", number)), dtype=torch.uint8)
    slot = empty_weight(300, 1024, GROUPED[form], torch.zeros)
    message = rf"^f: t: row 260 has a block with the {told}.* float16 .* quantize=\"none\""
    with pytest.raises(ModelError, match=message):
        placing.place(slot, weight, "f: t")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_place_regroups_some_rows_at_a_time(
    form: WeightFormat, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the CPU to where the slot is."""
    monkeypatch.setattr(placing, "_NUMBERS", 1)
    weight = random_weight(StoredKind(form), 300, 256)
    slot = empty_weight(300, 256, GROUPED[form], partial(torch.zeros, device=device))
    placing.place(slot, weight, "f: t")
    for found, expected in zip(slot.tensors(), regrouped(weight).tensors(), strict=True):
        assert torch.equal(found.cpu(), expected)


# --- a model --------------------------------------------------------------------------------------


def loaded(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> LoadedModel:
    weights = load_gguf_weights(GgufFile(path), config, dtype)
    check_weights(config, weights)
    return LoadedModel(config, weights, None)


HALVES = partial(StoredFormat, WeightFormat.INT4, columns=32, scale_dtype="float16")
INT8_GROUPS = StoredFormat(WeightFormat.INT8, columns=32, scale_dtype="float16")
POINTS = StoredKind(WeightFormat.INT4, 1, 32, torch.float16, zeros=True)


@pytest.mark.parametrize(
    ("slot", "kind"),
    [
        (HALVES(offsets=True), StoredKind(WeightFormat.Q4_0)),
        (HALVES(offsets=True), POINTS),
        (HALVES(zeros=True), StoredKind(WeightFormat.Q4_0)),
        (HALVES(zeros=True), POINTS._replace(zeros=False, offsets=True)),
        (INT8_GROUPS, StoredKind(WeightFormat.Q4_K)),
        (StoredFormat(WeightFormat.FP8, 128, 128), StoredKind(WeightFormat.Q8_0)),
    ],
    ids=str,
)
def test_a_weight_that_does_not_become_what_a_model_asks_for_is_refused(
    slot: StoredFormat, kind: StoredKind
) -> None:
    weight = random_weight(kind, 8, 256)
    told = (
        rf"^f: t is stored as {kind.format.value}.*, which does not become {slot.format.value} \("
    )
    with pytest.raises(ModelError, match=told):
        placing.place(empty_weight(8, 256, slot, torch.zeros), weight, "f: t")


@pytest.mark.parametrize("family", ["llama", WITH_HEAD], ids=["llama", "qwen3"])
@pytest.mark.parametrize("kind_of", [Q4_K_M, OTHERS], ids=["q4_k_m", "others"])
def test_a_model_of_regrouped_blocks_has_the_logits_of_its_file(
    family: str | dict[str, Any], kind_of: KindOf, tmp_path: Path
) -> None:
    """With parts of a projection in several formats, and rows that are turned back."""
    path = tmp_path / "m.gguf"
    write_stored_gguf(family, path, kind_of)
    stored = read_config(path)
    grouped = loaded(path, in_groups(stored))
    assert str(grouped.config.quantization) == "weights in int4, int8"
    assert len(grouped.weights.layers[0].attention.qkv.weights) > 1
    plain = loaded(path, replace(stored, quantization=None))
    found, expected = logits(grouped), logits(plain)
    assert (found - expected).norm() < (1e-3 if kind_of is Q4_K_M else 1e-5) * expected.norm()
    for (name, weight), (_, numbers) in zip(
        weight_modules(grouped.weights), weight_modules(plain.weights), strict=True
    ):
        torch.testing.assert_close(
            dequantized(weight), numbers.data, atol=1e-3, rtol=2e-3, msg=name
        )


@pytest.mark.gpu
def test_a_gpu_gives_the_logits_of_the_blocks_that_it_loads(tmp_path: Path) -> None:
    cuda, path = torch.device("cuda"), tmp_path / "m.gguf"
    write_stored_gguf(WITH_HEAD, path, Q4_K_M)
    found = load_model(path, torch.bfloat16, "cuda", "stored")
    kept = kept_config(read_config(path), target_of(cuda), "bfloat16")
    assert found.config.quantization == kept.quantization
    expected = logits(load_model(path, torch.float32))
    assert (logits(found).float() - expected).norm() < 0.03 * expected.norm()


def test_a_gpu_with_hopper_kernels_regroups_what_a_cpu_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_stored_gguf(WITH_HEAD, path, Q4_K_M)
    stored, cuda = read_config(path), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))

    def on(gpu: tuple[int, int], quantize: str | None, dtype: torch.dtype) -> ModelConfig:
        monkeypatch.setattr(loader, "target_of", lambda device: gpu_target(gpu))
        return config_in_memory(stored, quantize, dtype, cuda)

    plain = replace(stored, quantization=None)
    half, hopper, ampere = torch.bfloat16, (9, 0), (8, 0)
    assert [on(hopper, one, half) for one in (None, "stored", "none")] == [
        in_groups(stored),
        in_groups(stored),
        plain,
    ]
    for gpu, dtype in ((ampere, half), (hopper, torch.float32)):
        assert [on(gpu, one, dtype) for one in (None, "stored")] == [plain, stored]
    bytes_of = [empty_weights(one, half, "meta").nbytes for one in (stored, in_groups(stored))]
    assert bytes_of[0] < bytes_of[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (bytes_of[1], 1 << 40))
    assert [on(hopper, one, half) for one in (None, "stored")] == [stored, stored]
    for quantize in (None, "stored"):
        cpu = torch.device("cpu")
        assert config_in_memory(stored, quantize, half, cpu) == stored
    assert load_model(path).config.quantization == stored.quantization


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", Kind.Q5_K),
        ("llama", Kind.Q5_1),
        ({**WITH_HEAD, "intermediate_size": 96}, Kind.Q8_0),
    ],
    ids=["q5_k", "q5_1", "no multiple of 256 columns"],
)
def test_a_model_with_blocks_that_are_not_regrouped_stays_as_it_is(
    family: str | dict[str, Any], kind: Kind, tmp_path: Path
) -> None:
    write_stored_gguf(
        family, tmp_path / "m.gguf", mixed(gate_proj=Kind.Q8_0, up_proj=Kind.Q8_0, down_proj=kind)
    )
    stored = read_config(tmp_path / "m.gguf")
    assert kept_config(stored, H200, "bfloat16") == stored
    assert roomy_config(stored, H200, "bfloat16") == replace(stored, quantization=None)


def test_a_plan_of_a_file_is_that_of_its_regrouped_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    write_stored_gguf(WITH_HEAD, path, Q4_K_M)

    def planned(*flags: str) -> dict[str, Any]:
        plan = "info", "--plan", str(path), "--dtype", "bfloat16", "--json", "--device"
        code, out, _ = run(capsys, *plan, *flags)
        assert code == 0
        found: dict[str, Any] = json.loads(out)
        return found

    for quantize in ((), ("--quantize", "stored")):
        found = planned("h200", *quantize)
        assert found["quantization"] == "weights in int4, int8"
        kernels = {(one["op"], one["kernel"]) for one in found["kernels"]}
        assert ("q, k, v", "narrow") in kernels
        assert "tile" not in {kernel for _, kernel in kernels}
    assert planned("a100")["quantization"] is None
    kept = planned("a100", "--quantize", "stored")
    assert kept["quantization"] == "weights in q4_k, q6_k"
