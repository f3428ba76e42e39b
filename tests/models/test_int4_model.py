"""Checkpoints with weights of four bits: logits and tokens of the same numbers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_ext.dequantize import dequantized
from photon_ext.errors import ModelError
from photon_ext.models.loading.int4_config import Layout
from photon_ext.models.loading.loader import load_model
from photon_ext.models.weights import check_weights, weight_modules
from photon_ext.sampling import SamplingParams
from photon_ext.weight_format import WeightFormat
from tests.engine.test_engine_models import tiny_engine
from tests.models import stored_int4
from tests.models.published import PUBLISHED
from tests.models.stored_fp8 import FP8, LINEARS
from tests.models.stored_int4 import Codes, awq, gptq
from tests.models.test_quantization import DOWN, IDS, QWEN3, logits
from tests.models.tiny import saved_random_model

GROUP = 32


def codes_of(weight: torch.Tensor, zeros: bool, dtype: torch.dtype) -> tuple[Codes, torch.Tensor]:
    """A weight rounded to four bits, and its numbers."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).to(dtype)
    generator = torch.Generator().manual_seed(len(weight))
    zero = torch.randint(6, 10, scale.shape, generator=generator)
    zero = zero if zeros else torch.full_like(zero, 8)
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    numbers = (codes - zero[..., None]) * scale.float()[..., None]
    return Codes(codes.int().flatten(1).tolist(), zero.tolist(), scale), numbers.flatten(1)


def store_int4(
    values: dict[str, Any],
    folder: Path,
    layout: Layout,
    config: dict[str, Any],
    zeros: bool,
    dtype: torch.dtype = torch.float16,
) -> None:
    """A random model in folder / "int4", its head plain, and its numbers in folder / "plain"."""
    saved_random_model(values, folder / "plain")
    dense = load_file(folder / "plain" / "model.safetensors")
    tensors = dict(dense)
    for name, weight in list(dense.items()):
        if LINEARS.fullmatch(name) and "lm_head" not in name:
            module = name.removesuffix(".weight")
            codes, dense[name] = codes_of(weight, zeros, dtype)
            del tensors[name]
            stored = stored_int4.stored(layout, codes)
            tensors |= {f"{module}.{last}": one for last, one in stored.items()}
    (folder / "int4").mkdir()
    save_file(dense, folder / "plain" / "model.safetensors")
    save_file(tensors, folder / "int4" / "model.safetensors")
    fields = json.loads((folder / "plain" / "config.json").read_text())
    fields["quantization_config"] = config
    (folder / "int4" / "config.json").write_text(json.dumps(fields))


def compressed(zeros: bool) -> dict[str, Any]:
    return stored_int4.compressed(group_size=GROUP, symmetric=not zeros)


SCHEMES: dict[str, tuple[Layout, dict[str, Any], bool]] = {
    "gptq": (Layout.GPTQ, gptq(group_size=GROUP, sym=False), True),
    "gptq v2, symmetric": (
        Layout.GPTQ_V2,
        gptq(group_size=GROUP, sym=True, checkpoint_format="gptq_v2"),
        False,
    ),
    "awq": (Layout.AWQ, awq(group_size=GROUP), True),
    "compressed-tensors": (Layout.COMPRESSED, compressed(False), False),
    "compressed-tensors with zeros": (Layout.COMPRESSED, compressed(True), True),
}


def assert_same_numbers(folder: Path, device: str = "cpu") -> None:
    stored, plain = (
        load_model(folder / name, torch.float32, device, "stored") for name in ("int4", "plain")
    )
    check_weights(stored.config, stored.weights)
    formats = [weight.format for module, weight in weight_modules(stored.weights)]
    assert set(formats) == {WeightFormat.DENSE, WeightFormat.INT4}
    torch.testing.assert_close(logits(stored), logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_of_four_bits_gives_the_logits_of_the_same_numbers(
    scheme: str, tmp_path: Path, device: str
) -> None:
    layout, config, zeros = SCHEMES[scheme]
    store_int4(QWEN3, tmp_path, layout, config, zeros)
    assert_same_numbers(tmp_path, device)


@pytest.mark.parametrize("family", ["granite-3", "phi-4-mini"])
def test_what_families_fold_into_weights_goes_into_scales_and_rows(
    family: str, tmp_path: Path
) -> None:
    """Factors of what is added to the residual; an order of the rows of q and k."""
    store_int4(PUBLISHED[family], tmp_path, Layout.COMPRESSED, compressed(True), True)
    assert_same_numbers(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hazard_c12_scales_keep_the_dtype_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """So that none of them overflows or becomes zero."""
    store_int4(QWEN3, tmp_path, Layout.COMPRESSED, compressed(False), False, dtype)
    loaded = load_model(tmp_path / "int4")
    scale = loaded.weights.layers[0].mlp.down.weight.scale
    assert scale is not None
    assert scale.dtype is dtype
    assert_same_numbers(tmp_path)


def changed(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The checkpoint in `folder` with other tensors; None: without."""
    path = folder / "int4" / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, path)
    return folder / "int4"


NAN = torch.full((192, 10), torch.nan, dtype=torch.float16)
SCALE = f"{DOWN}.weight_scale"


def test_hazard_c12_scales_of_several_dtypes_are_kept_in_float32(tmp_path: Path) -> None:
    """As one module's would overflow in the other ones' dtype."""
    store_int4(QWEN3, tmp_path, Layout.COMPRESSED, compressed(False), False)
    large = load_file(tmp_path / "int4" / "model.safetensors")[SCALE].bfloat16() * 2**24
    folder = changed(tmp_path, {SCALE: large})
    weight = load_model(folder).weights.layers[1].mlp.down.weight
    assert weight.scale is not None
    assert torch.equal(weight.scale, large.float())


@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**24])
def test_hazard_c12_scales_that_float16_does_not_hold_are_made_anew_or_refused(
    size: float, tmp_path: Path
) -> None:
    """By quantize="int4", which keeps numbers that are stored as it would, of groups of 32 here."""
    values = {**QWEN3, "intermediate_size": 96, "num_hidden_layers": 2}
    store_int4(values, tmp_path, Layout.COMPRESSED, compressed(False), False, torch.bfloat16)
    scale = load_file(tmp_path / "int4" / "model.safetensors")[SCALE] * size
    folder = changed(tmp_path, {SCALE: scale})
    if size > 1:
        packed = SCALE.removesuffix("scale") + "packed"
        message = rf"int4/model\.safetensors: {packed}: int4: the weight has a number of magnitude"
        with pytest.raises(ModelError, match=message):
            load_model(folder, torch.float32, quantize="int4")
        return
    before, after = (
        load_model(folder, torch.float32, quantize=one).weights.layers[1].mlp.down.weight
        for one in (None, "int4")
    )
    assert after.scale is not None
    assert after.scale.dtype is torch.float16
    numbers = dequantized(before)
    assert numbers.abs().max() > 1.7 * 2.0**-24
    assert (dequantized(after) - numbers).abs().max() <= (0.0 if size == 1 else 2.0**-24)


def test_an_engine_of_four_bits_has_the_tokens_of_the_same_numbers(tmp_path: Path) -> None:
    store_int4(QWEN3, tmp_path, *SCHEMES["awq"])
    answers = []
    for name in ("int4", "plain"):
        with tiny_engine(tmp_path / name, depth=2, exact=False) as engine:
            params = SamplingParams(max_new_tokens=12, ignore_eos=True)
            outputs = engine.generate([IDS[:3], IDS[:17]], params)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_gptq_files_may_hold_biases_of_zeros(tmp_path: Path) -> None:
    """Old ones do, of linears that have none."""
    store_int4(QWEN3, tmp_path, *SCHEMES["gptq"])
    path = tmp_path / "int4" / "model.safetensors"
    bias = "model.layers.1.mlp.down_proj.bias"
    tensors = load_file(path)
    save_file({**tensors, bias: torch.zeros(192)}, path)
    assert_same_numbers(tmp_path)
    save_file({**tensors, bias: torch.ones(192)}, path)
    with pytest.raises(ModelError, match=f"1 parameters would be ignored, first '{bias}'"):
        load_model(tmp_path / "int4")


def test_hazard_c4_groups_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    store_int4(QWEN3, tmp_path, *SCHEMES["gptq"])
    path = tmp_path / "int4" / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["group_size"] = 128
    path.write_text(json.dumps(fields))
    message = r"q_proj has 192 columns, .* asks for whole groups of 128; use a checkpoint with sm"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "int4")


NAMES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "compressed-tensors with zeros": ("weight_zero_point",),
}


@pytest.mark.parametrize("scheme", NAMES)
def test_tensors_that_are_missing_or_too_many_are_named(scheme: str, tmp_path: Path) -> None:
    store_int4(QWEN3, tmp_path, *SCHEMES[scheme])
    path = tmp_path / "int4" / "model.safetensors"
    whole = path.read_bytes()
    for last in NAMES[scheme]:
        with pytest.raises(
            ModelError, match=f"1 of .* parameters are missing, first '{DOWN}.{last}'"
        ):
            load_model(changed(tmp_path, {f"{DOWN}.{last}": None}))
        path.write_bytes(whole)
    for last in ("weight", "scale", "weight_zero_point_2"):
        with pytest.raises(
            ModelError, match=f"1 parameters would be ignored, first '{DOWN}.{last}'"
        ):
            load_model(changed(tmp_path, {f"{DOWN}.{last}": torch.ones(2, 2)}))
        path.write_bytes(whole)
    assert_same_numbers(tmp_path)


@pytest.mark.parametrize("scheme", ["awq", "compressed-tensors"])
def test_a_module_in_fp8_is_refused_in_a_checkpoint_of_four_bits(
    scheme: str, tmp_path: Path
) -> None:
    store_int4({**QWEN3, "num_hidden_layers": 2}, tmp_path, *SCHEMES[scheme])
    head: dict[str, torch.Tensor | None] = {"lm_head.weight": torch.ones(131, 192).to(FP8)}
    path = tmp_path / "int4" / "model.safetensors"
    whole = path.read_bytes()
    with pytest.raises(ModelError, match=r"lm_head\.weight is stored as F8_E4M3; use a checkpoint"):
        load_model(changed(tmp_path, head))
    path.write_bytes(whole)
    fp8: dict[str, torch.Tensor | None] = {name: None for name in load_file(path) if DOWN in name}
    fp8[f"{DOWN}.weight"] = torch.ones(192, 320).to(FP8)
    fp8[f"{DOWN}.weight_scale"] = torch.ones(192, 1)
    with pytest.raises(ModelError, match=f"parameters are missing, first '{DOWN}"):
        load_model(changed(tmp_path, fp8))


def test_a_checkpoint_in_shards_is_the_one_in_one_file(tmp_path: Path) -> None:
    """The tensors of a module in several of them."""
    store_int4(QWEN3, tmp_path, *SCHEMES["compressed-tensors with zeros"])
    folder = tmp_path / "int4"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file(
            {name: tensors[name] for name in tensors if places[name] == shard}, folder / shard
        )
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_numbers(tmp_path)
    save_file(
        {
            one: NAN if one == SCALE else tensors[one]
            for one in tensors
            if places[one] == places[SCALE]
        },
        folder / places[SCALE],
    )
    with pytest.raises(ModelError, match=rf"{SCALE} is nan at \[0, 0\]"):
        load_model(folder)
