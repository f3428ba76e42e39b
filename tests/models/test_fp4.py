"""Checkpoints with mxfp4 and nvfp4 weights: their bytes against plain Python, the numbers of the
library that writes them, logits and tokens of the same numbers in float32, and clear errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_ext.dequantize import dequantized
from photon_ext.errors import ModelError
from photon_ext.models.kernel_plan import gpu_target, linears_unsupported, plan_kernels
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.hf_quantization import hf_quantization
from photon_ext.models.loading.loader import LoadedModel, load_model
from photon_ext.models.loading.module_reader import Fp4Reader
from photon_ext.models.quantization import Fp4Scheme
from photon_ext.models.weights import check_weights, weight_modules
from photon_ext.sampling import SamplingParams
from photon_ext.weight_format import WeightFormat
from tests.engine.test_engine_models import tiny_engine
from tests.models.published import PUBLISHED
from tests.models.stored_fp4 import (
    BLOCK,
    FP8,
    MXFP4,
    NVFP4,
    Fp4,
    compressed,
    e2m1,
    e4m3,
    numbers,
    random_fp4,
    store_fp4,
    stored,
)
from tests.models.test_quantization import DOWN, IDS, QWEN3, logits
from tests.ops.numeric import randn

FORMS = pytest.mark.parametrize("form", [MXFP4, NVFP4], ids=lambda form: form.value)
FILE = Path("a/model.safetensors")
SCHEMES = {MXFP4: Fp4Scheme(MXFP4), NVFP4: Fp4Scheme(NVFP4, divides=True)}


# --- numbers --------------------------------------------------------------------------------------


@FORMS
def test_numbers_are_those_of_the_bytes_that_were_stored(form: WeightFormat) -> None:
    weight = random_fp4(form, 24, 160)
    read = Fp4Reader(SCHEMES[form]).weight(stored(weight), FILE, DOWN)
    assert (read.n, read.k, read.format) == (24, 160, form)
    assert torch.equal(dequantized(read), numbers(weight))


def test_the_writer_is_that_of_the_layouts() -> None:
    """What the tests here stand on, once by hand."""
    weight = Fp4(NVFP4, [[*range(16)]], [[0x38]], 2.0)
    tensors = stored(weight)
    assert tensors["weight_packed"].tolist() == [[16, 50, 84, 118, 152, 186, 220, 254]]
    halves = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    assert numbers(weight).tolist() == [[*halves, *(-one for one in halves)]]
    assert [e2m1(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    finite = [code for code in range(256) if code & 127 != 127]
    eight = torch.tensor(finite, dtype=torch.uint8).view(FP8)
    assert [e4m3(code) for code in finite] == eight.float().tolist()
    assert numbers(Fp4(MXFP4, [[7] * 32], [[120]])).tolist() == [[6 * 2.0**-7] * 32]


@FORMS
@pytest.mark.parametrize("preset", ["a16", ""])
def test_numbers_are_those_of_compressed_tensors(form: WeightFormat, preset: str) -> None:
    """Of weights that it has rounded and packed, and whatever it does to activations."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme(f"{form.value}{preset}", ["Linear"])
    weight = randn(44, 256, dtype=torch.float32, device="cpu")
    shares = weight.view(44, -1, BLOCK[form])
    least, most = shares.amin(-1), shares.amax(-1)
    given = {"weight": weight}
    if form is NVFP4:
        given["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(
        least, most, scheme.weights, global_scale=given.get("weight_global_scale")
    )
    compressor = BaseCompressor.get_value_from_registry(f"{form.value}-pack-quantized")
    tensors = compressor.compress({**given, "weight_scale": scale}, scheme)
    wanted = compressor.decompress(tensors, scheme)["weight"]

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=f"{form.value}-pack-quantized"
    )
    fields = {"quantization_config": json.loads(json.dumps(config.to_dict(), default=str))}
    found = hf_quantization(ConfigReader(fields, "config.json"), "config.json")
    assert found == SCHEMES[form]
    reader = Fp4Reader(SCHEMES[form])
    assert set(reader.expected("a", 44, 256)) == {f"a.{name}" for name in tensors}
    read = dequantized(reader.weight(tensors, FILE, "a"))
    assert torch.equal(read.to(wanted.dtype), wanted)
    assert (read - weight).norm() < 0.2 * weight.norm(), "the library has packed this weight"


# --- models ---------------------------------------------------------------------------------------


def assert_same_numbers(folder: Path, device: str = "cpu") -> LoadedModel:
    fp4, plain = (
        load_model(folder / name, torch.float32, device, "stored") for name in ("fp4", "plain")
    )
    check_weights(fp4.config, fp4.weights)
    formats = {weight.format for _, weight in weight_modules(fp4.weights)}
    assert formats in ({WeightFormat.DENSE, MXFP4}, {WeightFormat.DENSE, NVFP4})
    torch.testing.assert_close(logits(fp4), logits(plain), atol=1e-4, rtol=1e-4)
    return fp4


@FORMS
def test_a_checkpoint_gives_the_logits_of_the_same_numbers(
    form: WeightFormat, tmp_path: Path, device: str
) -> None:
    store_fp4(QWEN3, tmp_path, form)
    loaded = assert_same_numbers(tmp_path, device)
    title = f"{form.value} weights, scales one for {BLOCK[form]} columns of a row"
    assert str(loaded.config.quantization) == title
    down = loaded.weights.layers[1].mlp.down.weight
    bits = {MXFP4: 4 + 8 / 32, NVFP4: 4 + 8 / 16 + 32 / 320}[form]
    assert down.nbytes == 192 * 320 * bits / 8


@FORMS
@pytest.mark.parametrize("family", ["granite-3", "phi-4-mini"])
def test_what_families_fold_into_weights_divides_scales_and_turns_rows(
    family: str, form: WeightFormat, tmp_path: Path
) -> None:
    """Factors of what is added to the residual; an order of the rows of q and k."""
    store_fp4(PUBLISHED[family], tmp_path, form)
    assert_same_numbers(tmp_path)


def test_hazard_c5_parts_of_a_projection_keep_their_own_global_scale(tmp_path: Path) -> None:
    """Of magnitudes 1:100."""
    store_fp4(QWEN3, tmp_path, NVFP4, small="up_proj")
    divisor = assert_same_numbers(tmp_path).weights.layers[0].mlp.gate_up.weight.divisor
    assert divisor is not None
    assert 50 < float(divisor[320] / divisor[0]) < 200


@pytest.mark.parametrize("quantize", ["none", "fp8", "int4"])
@FORMS
def test_weights_may_be_expanded_or_rounded_otherwise_as_they_are_loaded(
    form: WeightFormat, quantize: str, tmp_path: Path
) -> None:
    folder = store_fp4({**QWEN3, "num_hidden_layers": 2}, tmp_path, form)
    found, wanted = (
        dequantized(
            load_model(one, torch.float32, quantize=quantize).weights.layers[1].mlp.down.weight
        )
        for one in (folder, tmp_path / "plain")
    )
    assert torch.equal(found, wanted)


@FORMS
def test_an_engine_has_the_tokens_of_the_same_numbers(form: WeightFormat, tmp_path: Path) -> None:
    store_fp4(QWEN3, tmp_path, form)
    answers = []
    for name in ("fp4", "plain"):
        with tiny_engine(tmp_path / name, depth=2, exact=False) as engine:
            params = SamplingParams(max_new_tokens=12, ignore_eos=True)
            outputs = engine.generate([IDS[:3], IDS[:17]], params)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def changed(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The checkpoint in `folder` with other tensors; None: without."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, path)
    return folder


def test_a_static_scheme_of_activations_is_known_and_not_read(tmp_path: Path) -> None:
    folder = store_fp4(QWEN3, tmp_path, NVFP4)
    changed(folder, {f"{DOWN}.input_global_scale": torch.ones(1)})
    assert_same_numbers(tmp_path)


# --- what does not belong together ----------------------------------------------------------------

PACKED, SCALE, GLOBAL = (f"{DOWN}.weight_{last}" for last in ("packed", "scale", "global_scale"))


def bytes_with(form: WeightFormat, value: int, usual: int) -> torch.Tensor:
    """Scales of DOWN, of which one has this byte."""
    scale = torch.full((192, 320 // BLOCK[form]), usual, dtype=torch.uint8)
    scale[3, 1] = value
    return scale if form is MXFP4 else scale.view(FP8)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        (NVFP4, {PACKED: None}, f"parameters are missing, first '{PACKED}'"),
        (MXFP4, {SCALE: None}, f"parameters are missing, first '{SCALE}'"),
        (NVFP4, {GLOBAL: None}, f"parameters are missing, first '{GLOBAL}'"),
        (MXFP4, {GLOBAL: torch.ones(1)}, f"would be ignored, first '{GLOBAL}'"),
        (NVFP4, {f"{DOWN}.weight": torch.ones(2)}, f"would be ignored, first '{DOWN}.weight'"),
        (NVFP4, {f"{DOWN}.weight_zero_point": torch.ones(2)}, "would be ignored, first"),
        (MXFP4, {SCALE: torch.ones(192, 20).byte()}, r"has shape \[192, 20\].*for \[192, 10\]"),
        (NVFP4, {SCALE: torch.ones(192, 10).to(FP8)}, r"has shape \[192, 10\].*for \[192, 20\]"),
        (NVFP4, {GLOBAL: torch.ones(2)}, rf"{GLOBAL} has shape \[2\].*asks for \[1\]"),
        (NVFP4, {SCALE: torch.ones(192, 20).byte()}, "is stored as U8, and .* says F8_E4M3"),
        (MXFP4, {SCALE: torch.ones(192, 10)}, "is stored as F32, and .* says U8"),
        (NVFP4, {GLOBAL: torch.ones(1).half()}, "is stored as F16, and .* says F32"),
        (MXFP4, {SCALE: bytes_with(MXFP4, 255, 120)}, rf"{SCALE} is nan at \[3, 1\], and numbers"),
        (NVFP4, {SCALE: bytes_with(NVFP4, 127, 56)}, rf"{SCALE} is nan at \[3, 1\], and numbers"),
        (NVFP4, {SCALE: bytes_with(NVFP4, 255, 56)}, rf"{SCALE} is nan at \[3, 1\], and numbers"),
        (MXFP4, {SCALE: bytes_with(MXFP4, 253, 120)}, r"is 8.50706e\+37 at \[3, 1\]"),
        (NVFP4, {GLOBAL: torch.full((1,), 1e-37)}, r"weight_scale is .* at .* finite in float32"),
        (NVFP4, {GLOBAL: torch.zeros(1)}, f"{GLOBAL} is 0, and scales are divided by it; the file"),
        (NVFP4, {GLOBAL: -torch.ones(1)}, f"{GLOBAL} is -1, and scales are divided"),
        (NVFP4, {GLOBAL: torch.full((1,), torch.nan)}, f"{GLOBAL} is nan, and scales are"),
        (NVFP4, {GLOBAL: torch.full((1,), torch.inf)}, f"{GLOBAL} is inf, and scales are"),
    ],
)
def test_hazard_c6_scales_of_blocks_that_do_not_belong_to_numbers_are_refused(
    form: WeightFormat, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = store_fp4({**QWEN3, "num_hidden_layers": 2}, tmp_path, form)
    with pytest.raises(ModelError, match=message):
        load_model(changed(folder, changes))


def test_the_largest_scale_whose_numbers_are_finite_is_read(tmp_path: Path) -> None:
    folder = store_fp4({**QWEN3, "num_hidden_layers": 2}, tmp_path, MXFP4)
    scale = bytes_with(MXFP4, 252, 120)
    weight = load_model(changed(folder, {SCALE: scale})).weights.layers[1].mlp.down.weight
    assert weight.scale is not None
    assert torch.equal(weight.scale, scale)
    assert bool(dequantized(weight).isfinite().all())


@pytest.mark.parametrize(("form", "k"), [(MXFP4, 48), (NVFP4, 40), (MXFP4, 0), (NVFP4, 0)])
def test_hazard_c4_blocks_that_do_not_divide_the_columns_are_refused(
    form: WeightFormat, k: int
) -> None:
    message = rf"a\.b has {k} columns, and {form.value} asks for whole blocks of {BLOCK[form]}"
    with pytest.raises(ModelError, match=f"{message}; use a checkpoint"):
        Fp4Reader(SCHEMES[form]).expected("a.b", 8, k)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed(MXFP4, group_size=16), "mxfp4 weights with group_size 16"),
        (compressed(NVFP4, group_size=None), "nvfp4 weights with group_size None"),
        (compressed(NVFP4, strategy="group"), "nvfp4 weights with strategy 'group'"),
        (compressed(MXFP4, strategy="tensor_group"), "mxfp4 weights with strategy 'tensor_group'"),
        (compressed(MXFP4, type="int"), "'mxfp4-pack-quantized' and weights of type 'int' of 4 b"),
        (compressed(NVFP4, num_bits=8), "weights of type 'float' of 8 bits"),
        (compressed(NVFP4, symmetric=False), "compressed-tensors with zero points"),
        (compressed(NVFP4, actorder="group"), "compressed-tensors with zero points or actorder"),
        (compressed(NVFP4, fields={"transform_config": {"a": 1}}), "with transform_config"),
        (compressed(MXFP4, fields={"format": "mxfp8-pack-quantized"}), "'mxfp8-pack-quantized'"),
    ],
)
def test_other_schemes_are_refused_by_name_with_what_can_be_read(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"a/config\.json: .*{message}.*nvfp4-pack-quantized"):
        hf_config({**QWEN3, "quantization_config": config}, "a/config.json")


@FORMS
def test_hazard_c7_modules_of_the_ignore_list_are_plain(form: WeightFormat) -> None:
    config = compressed(form, ["re:.*mlp.gate.*", "lm_head", DOWN])
    scheme = hf_config({**QWEN3, "quantization_config": config}).quantization
    assert scheme is not None
    left = ["model.embed_tokens", "lm_head", DOWN, "model.layers.0.mlp.gate_proj"]
    kept = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"]
    assert [one for one in (*left, *kept) if scheme.of(one) is None] == left


@FORMS
def test_on_a_gpu_steps_go_through_the_portable_linears(form: WeightFormat) -> None:
    config = hf_config({**QWEN3, "quantization_config": compressed(form)})
    target = gpu_target((9, 0))
    why = linears_unsupported(config, target, "bfloat16")
    assert why == "q, k, v: of weights of fewer bits they read fp8, int4 and int8"
    assert plan_kernels(config, target, "bfloat16").decode.fused_tokens == 0
