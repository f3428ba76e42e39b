"""Checkpoints with fp8 weights: logits and tokens of the same numbers in float32, and clear errors
for files and configs that say something else.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.kernel_plan import (
    ALL,
    GPUS,
    STORED_BATCH_TOKENS,
    ExecutionMode,
    ExecutionModes,
    KernelPlan,
    Target,
    gpu_target,
    linears_unsupported,
    plan_kernels,
)
from photon_ext.models.loading import loader
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.loader import LoadedModel, config_in_memory, load_model
from photon_ext.models.lora import LoraShape, LoraSlots
from photon_ext.models.projections import head_projection, layer_projections
from photon_ext.models.quantization import StoredFormat
from photon_ext.models.weights import check_weights, empty_weights, random_weights
from photon_ext.sampling import SamplingParams
from photon_ext.weight_format import WeightFormat
from tests.engine.test_engine_models import tiny_engine
from tests.models.adapters import adapter_tensors, saved_adapter
from tests.models.harness import Chunk, Harness
from tests.models.published import PUBLISHED, TINY_SIZES
from tests.models.stored_fp8 import FP8, blocks, compressed, store_fp8
from tests.models.stored_int4 import awq
from tests.models.tiny import saved_random_model

# q, k and v are of 128 rows each, so that blocks stay blocks; gate and up of 320 share one.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32, "num_key_value_heads": 4}
QWEN3 = {
    **TINY_SIZES,
    **SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
IDS = [(11 * i + i // 7) % 131 for i in range(40)]
DOWN = "model.layers.1.mlp.down_proj"


def folders(tmp_path: Path, values: dict[str, Any], config: dict[str, Any], **how: Any) -> Path:
    """tmp_path / "fp8", and the same numbers in float32 in tmp_path / "plain"."""
    saved_random_model(values, tmp_path / "plain")
    store_fp8(tmp_path / "plain", tmp_path / "fp8", config, **how)
    return tmp_path / "fp8"


def logits(model: LoadedModel, plan: KernelPlan | None = None) -> torch.Tensor:
    """Of a prompt in one step, and of tokens that follow it one by one."""
    harness = Harness(model.config, model.weights, plan=plan)
    found = [harness.prefill([Chunk(1, 0, IDS[:32])])[0]]
    found += [harness.decode([1], [i], [IDS[i]])[0] for i in range(32, 40)]
    return torch.stack(found)


def assert_same_numbers(tmp_path: Path, device: str = "cpu") -> LoadedModel:
    stored, plain = (
        load_model(tmp_path / name, torch.float32, device, "stored") for name in ("fp8", "plain")
    )
    check_weights(stored.config, stored.weights)
    assert stored.weights.nbytes < 0.6 * plain.weights.nbytes
    torch.testing.assert_close(logits(stored), logits(plain), atol=1e-4, rtol=1e-4)
    return stored


def test_blocks_of_qwen3_give_the_logits_of_the_same_numbers(tmp_path: Path, device: str) -> None:
    folder = folders(tmp_path, QWEN3, blocks(["lm_head", "model.layers.0.input_layernorm"]))
    stored = assert_same_numbers(tmp_path, device)
    layer = stored.weights.layers[0]
    shapes = [
        [list(weight.scale.shape) for weight in one.weights if weight.scale is not None]
        for one in (layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert shapes == [[[3, 2]], [[3, 2], [3, 2]], [[2, 3]]]
    assert layer.mlp.down.weight.data.dtype is FP8
    assert stored.weights.head.weight.scale is None
    assert str(stored.config.quantization) == "fp8 weights, scales one a block of 128 x 128"
    in_bfloat16 = logits(load_model(folder, None, device, "stored")).float()
    assert (in_bfloat16 - logits(stored)).norm() < 0.05 * logits(stored).norm()


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_hazard_c16_each_strategy_of_compressed_tensors_is_read(
    strategy: str, tmp_path: Path
) -> None:
    how = {"strategy": strategy, "left_out": (), "scale_dtype": torch.bfloat16}
    folders(tmp_path, QWEN3, compressed(strategy, []), **how)
    stored = assert_same_numbers(tmp_path)
    assert stored.weights.head.weight.data.dtype is FP8


@pytest.mark.parametrize("family", ["granite-3", "phi-4-mini"])
def test_what_families_fold_into_weights_goes_into_scales(family: str, tmp_path: Path) -> None:
    """Factors of what is added to the residual; an order of the rows of q and k."""
    values = PUBLISHED[family]
    folders(tmp_path, values, compressed("channel"), strategy="channel")
    assert_same_numbers(tmp_path)


def test_an_engine_of_fp8_weights_has_the_tokens_of_the_same_numbers(tmp_path: Path) -> None:
    folders(tmp_path, QWEN3, blocks(["lm_head"]))
    answers = []
    for name in ("fp8", "plain"):
        with tiny_engine(tmp_path / name, depth=2, exact=False) as engine:
            params = SamplingParams(max_new_tokens=12, ignore_eos=True)
            outputs = engine.generate([IDS[:3], IDS[:17]], params)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_hazard_c15_adapters_read_what_fp8_weights_read(tmp_path: Path) -> None:
    """Activations of the model's dtype, and add to the products."""
    model = saved_random_model(QWEN3, tmp_path / "plain")
    store_fp8(tmp_path / "plain", tmp_path / "fp8", blocks(["lm_head"]))
    adapter = saved_adapter(tmp_path / "adapter", adapter_tensors(model, 4, 0), 4)
    answers = []
    for name in ("fp8", "plain"):
        config, weights, _ = load_model(tmp_path / name, torch.float32)
        lora = LoraSlots(LoraShape(config, 4), 1, 64, torch.float32, weights.device)
        lora.load(1, lora.read(adapter)).wait()
        harness = Harness(config, weights, lora=lora)
        for slots in ({}, {1: 1, 2: 1}):
            harness.slots = slots
            answers.append(harness.greedy([IDS[:3], IDS[:17]], 12))
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


def test_hazard_c5_parts_of_a_projection_keep_the_scale_of_their_own_matrix(
    tmp_path: Path,
) -> None:
    """Of magnitudes 1:100, in a file of one scale a matrix."""
    saved_random_model(QWEN3, tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if re.search("k_proj|up_proj", name):
            tensors[name] *= 0.01
    save_file(tensors, path)
    store_fp8(tmp_path / "plain", tmp_path / "fp8", compressed("tensor"), "tensor")
    layer = assert_same_numbers(tmp_path).weights.layers[0]
    for projection, rows in ((layer.attention.qkv, 128), (layer.mlp.gate_up, 320)):
        scale = projection.weight.scale
        assert scale is not None
        assert 50 < float(scale[0] / scale[rows]) < 200


def test_a_static_scheme_of_activations_is_known_and_not_read(tmp_path: Path) -> None:
    folder = folders(tmp_path, QWEN3, compressed("channel"), strategy="channel")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{DOWN}.input_scale": torch.ones(1)}, folder / "model.safetensors")
    assert_same_numbers(tmp_path)


def test_scales_of_keys_and_values_are_known_and_not_read(tmp_path: Path) -> None:
    """An engine that stores them in fp8 has scales of its own."""
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    config = {**compressed("channel"), "kv_cache_scheme": scheme}
    folder = folders(tmp_path, QWEN3, config, strategy="channel")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for which in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{which}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    assert_same_numbers(tmp_path)


# --- what does not belong together ----------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders(tmp_path_factory.mktemp("fp8"), QWEN3, blocks(["lm_head"]))


def damaged(
    checkpoint: Path,
    folder: Path,
    changes: dict[str, torch.Tensor | None],
    config: dict[str, Any] | None = None,
) -> Path:
    """A copy with other tensors (None: without), and another quantization_config."""
    tensors = {**load_file(checkpoint / "model.safetensors"), **changes}
    save_file(
        {name: one for name, one in tensors.items() if one is not None},
        folder / "model.safetensors",
    )
    values = json.loads((checkpoint / "config.json").read_text())
    values["quantization_config"] = config or values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


SCALE, NAN = f"{DOWN}.weight_scale_inv", torch.tensor(torch.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALE: None}, f"1 of .* parameters are missing, first '{SCALE}'; config.json does not"),
        (
            {SCALE: None, f"{DOWN}.weight": torch.zeros(192, 320)},
            f"missing, first '{SCALE}'; {DOWN}.weight is plain, .* among those that are left out",
        ),
        ({SCALE: None, f"{DOWN}.weight_scale": torch.ones(2, 3)}, f"missing, first '{SCALE}'"),
        ({f"{DOWN}.other_scale": torch.ones(1)}, f"would be ignored, first '{DOWN}.other_scale'"),
        ({SCALE: torch.ones(3, 2)}, rf"{SCALE} has shape \[3, 2\].*asks for \[2, 3\]"),
        ({SCALE: torch.ones(192, 1)}, rf"{SCALE} has shape \[192, 1\].*asks for \[2, 3\]"),
        ({SCALE: NAN.expand(2, 3).clone()}, f"{SCALE} has values that are not finite"),
        ({SCALE: torch.ones(2, 3).int()}, f"{SCALE} is stored as I32.*; the file is dam"),
        (
            {f"{DOWN}.weight": NAN.to(FP8).expand(192, 320).clone()},
            f"{DOWN}.weight has values that are not finite",
        ),
        (
            {f"{DOWN}.weight": torch.zeros(192, 320).bfloat16()},
            f"{DOWN}.weight is stored as BF16, and quantization_config .* F8_E4M3; .* left out",
        ),
    ],
)
def test_hazard_c6_scales_and_weights_that_do_not_belong_together_are_refused(
    changes: dict[str, torch.Tensor | None], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(damaged(checkpoint, tmp_path, changes))


def test_packed_tensors_without_a_quantization_config_are_told_of(
    checkpoint: Path, tmp_path: Path
) -> None:
    changes = {f"{DOWN}.weight": None, f"{DOWN}.qweight": torch.zeros(40, 192, dtype=torch.int32)}
    path = damaged(checkpoint, tmp_path, changes) / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"is of a quantized weight, and config\.json has no q"):
        load_model(tmp_path)


def stored_modules(config: dict[str, Any]) -> list[str]:
    """The modules of the second layer, and the head, that are stored in fp8."""
    found = hf_config({**QWEN3, "quantization_config": config})
    shapes = {**layer_projections(found, 1), "head": head_projection(found)}
    return [name for name, one in shapes.items() if not one.is_dense]


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (compressed("channel", []), ["qkv", "o", "gate_up", "down", "head"]),
        (compressed("channel", ["lm_head", DOWN]), ["qkv", "o", "gate_up"]),
        (compressed("channel", ["re:.*mlp.*", "lm_head"]), ["qkv", "o"]),
        # matched from the begin of a name on, and no part of one
        (compressed("channel", ["re:mlp.*", "down_proj"]), ["qkv", "o", "gate_up", "down", "head"]),
        (compressed("channel", ["re:model.layers.1.*"]), ["head"]),
        (blocks(), ["qkv", "o", "gate_up", "down"]),
        (blocks([DOWN]), ["qkv", "o", "gate_up", "head"]),
        (blocks(["model.layers.1", "lm_head"]), []),
        (
            blocks(["model.layers.1.mlp.gate_pro", "layers.11", "down_proj"]),
            ["qkv", "o", "gate_up", "head"],
        ),
    ],
)
def test_hazard_c7_modules_are_left_out_as_each_scheme_names_them(
    config: dict[str, Any], stored: list[str]
) -> None:
    assert stored_modules(config) == stored


def test_hazard_c7_modules_of_one_projection_may_be_stored_otherwise(tmp_path: Path) -> None:
    """Each is multiplied for itself, with biases in place."""
    names = ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj")
    config = compressed("channel", ["lm_head", *(f"model.{name}" for name in names)])
    values = {**QWEN3, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    how = {"strategy": "channel", "left_out": ("lm_head", *names)}
    folders(tmp_path, values, config, **how)
    layers = assert_same_numbers(tmp_path).weights.layers
    formats = [weight.format.value for weight in layers[1].attention.qkv.weights]
    assert formats == ["fp8", "dense", "fp8"]
    assert layers[1].attention.qkv.bias is not None
    assert len(layers[0].mlp.gate_up.weights) == 2


def test_hazard_c8_a_mixed_file_loads_as_its_config_says(tmp_path: Path) -> None:
    folders(
        tmp_path,
        QWEN3,
        compressed("channel", ["lm_head", "re:.*layers.1.mlp"]),
        strategy="channel",
        left_out=("lm_head", "layers.1.mlp"),
    )
    layers = assert_same_numbers(tmp_path).weights.layers
    assert layers[0].mlp.down.weight.scale is not None
    assert layers[1].mlp.down.weight.scale is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "gptq with desc_act true"),
        ({"quant_method": "awq"}, "awq with bits None"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        (blocks(weight_block_size=None), "fp8 weights with weight_block_size None"),
        (blocks(weight_block_size=[64, 128]), r"weight_block_size \[64, 128\]"),
        (blocks(scale_fmt="ue8m0"), "fp8 weights with scale_fmt 'ue8m0'"),
        (blocks(["("]), r"modules_to_not_convert comes to .* no regular expression"),
        (compressed("group", group_size=128), "compressed-tensors with strategy 'group'"),
        (compressed("channel", num_bits=4, type="int"), "weights of type 'int' of 4 bits"),
        (compressed("channel", symmetric=False), "zero points"),
        (compressed("block", block_structure=[1, 128]), r"block_structure \[1, 128\]"),
        ({**compressed("channel"), "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({**compressed("channel"), "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        (
            {**compressed("channel"), "kv_cache_scheme": {"type": "int", "num_bits": 8}},
            "with a kv_cache_scheme of another type than float8",
        ),
    ],
)
def test_other_schemes_are_refused_by_name_with_what_can_be_read(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"a/config\.json: .*{message}"):
        hf_config({**QWEN3, "quantization_config": config}, "a/config.json")


def test_rows_that_change_their_order_have_scales_of_their_own() -> None:
    with pytest.raises(ModelError, match="use a checkpoint with a scale for each row"):
        hf_config({**PUBLISHED["phi-4-mini"], "quantization_config": blocks()})


@pytest.mark.parametrize(("gpu", "has_kernels"), [("h100", True), ("a100", False)])
def test_a_gpu_without_kernels_for_them_expands_weights_where_it_has_room(
    monkeypatch: pytest.MonkeyPatch, gpu: str, has_kernels: bool
) -> None:
    """Unless it is asked not to."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    values = {**QWEN3, **sizes, "vocab_size": 512}
    stored = hf_config({**values, "quantization_config": blocks()})
    plain, cuda = hf_config(values), torch.device("cuda")
    monkeypatch.setattr(loader, "target_of", lambda device: gpu_target(GPUS[gpu]))
    size = empty_weights(plain, torch.bfloat16, "meta").nbytes
    for free, expected in ((2 * size, None), (size, stored.quantization)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        found = config_in_memory(stored, None, torch.bfloat16, cuda)
        assert found.quantization == (stored.quantization if has_kernels else expected)
    for quantize, expected in (("stored", stored.quantization), ("none", None)):
        found = config_in_memory(stored, quantize, torch.bfloat16, cuda)
        assert found.quantization == expected
    on_cpu = config_in_memory(stored, None, torch.bfloat16, torch.device("cpu"))
    assert on_cpu == stored


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z._0-9]+)*X",
        "(a|a)*b",
        "((a)+b)+",
        "((a+))*",
        "a*b+c*d+e*f{2}",
        ".?" * 26 + "!",
        "(c|c|c|c)" * 12,
    ],
)
def test_names_of_modules_that_may_take_hours_to_match_are_refused(pattern: str) -> None:
    config = awq(group_size=64, modules_to_not_convert=[pattern])
    with pytest.raises(ModelError, match=r"modules_to_not_convert comes to .* may take hours"):
        hf_config({**QWEN3, "quantization_config": config})


@pytest.mark.parametrize(
    "pattern", ["([0-3]|7)", r"[*+(|]{2}\(\*\*+", "(a+)?", "(ab)*(cd)+.*", "(?:q|k|v|o)_p.*?"]
)
def test_patterns_that_are_matched_soon_are_taken(pattern: str) -> None:
    config = awq(group_size=64, modules_to_not_convert=[pattern])
    hf_config({**QWEN3, "quantization_config": config})


def test_a_checkpoint_may_name_each_of_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """re keeps some hundred patterns: with more than that each question would compile all anew."""
    names = [f"model.layers.{i // 8}.x{i % 8}" for i in range(2000)]
    quantization = hf_config({**QWEN3, "quantization_config": blocks(names)}).quantization
    assert quantization is not None
    quantization.of("model.layers.1.mlp.up_proj")
    monkeypatch.setattr(re, "compile", None)
    assert quantization.of("model.layers.2.mlp.up_proj") is not None
    assert quantization.of("model.layers.2.x7") is None


def test_a_format_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"\['f8'\]"):
        hf_config({**QWEN3, "quantization_config": compressed("channel") | {"format": ["f8"]}})


def test_finite_scales_of_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    saved_random_model(QWEN3, tmp_path / "plain")
    store_fp8(tmp_path / "plain", tmp_path / "fp8", compressed("channel"), "channel")
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{DOWN}.weight_scale"].fill_(3e38)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"{DOWN}.weight_scale has values .*beyond float32"):
        load_model(tmp_path / "fp8", torch.float32, "cpu", "stored")


# --- which kernels run ----------------------------------------------------------------------------


def test_steps_of_fp8_weights_are_fused_where_hopper_kernels_read_all_of_them() -> None:
    config = hf_config({**QWEN3, "quantization_config": blocks()})
    target = gpu_target((9, 0))
    plan = plan_kernels(config, target, "bfloat16")
    assert (plan.hopper, plan.balanced_attention) == (True, True)
    modes = [plan.decode.of(tokens) for tokens in (1, 32, 33, ALL)]
    assert modes == [ExecutionMode.OWN] * 2 + [ExecutionMode.TORCH] * 2
    exact = plan_kernels(config, target, "bfloat16", exact=True)
    assert not exact.chunks.uses_torch
    why = linears_unsupported(config, target, "bfloat16")
    assert why == "q, k, v: columns of fp8 are no multiple of 128 (192)"
    wide = replace(config, hidden=256, intermediate=512, q_heads=4, head_dim=64)
    assert linears_unsupported(wide, target, "bfloat16") is None
    for fused in (
        plan_kernels(wide, target, "bfloat16").decode,
        plan_kernels(wide, target, "bfloat16").chunks,
    ):
        modes = [fused.of(tokens) for tokens in (1, 32, 33, STORED_BATCH_TOKENS, ALL)]
        batch = [ExecutionMode.BATCH] * 2  # for all that the head, which is dense, is of 131 rows
        assert modes == [ExecutionMode.FUSED] * 2 + batch + [ExecutionMode.TORCH]
    exact = plan_kernels(wide, target, "bfloat16", exact=True)
    assert exact.chunks.of(ALL) is ExecutionMode.FUSED
    on_cpu = plan_kernels(config, Target(), "bfloat16")
    assert not on_cpu.decode.uses_torch
    assert not on_cpu.chunks.uses_torch


@pytest.mark.parametrize("quantize", ["stored", "int4"])
@pytest.mark.parametrize("rows", [None, 128])
def test_torch_multiplies_by_weights_that_are_decoded_for_it(
    quantize: str, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a matrix at once, or so many rows at a time; the products of a matrix whose modules
    are stored otherwise, with biases, and a head.
    """
    if rows is not None:
        monkeypatch.setattr("photon_ext.models.layers.buffers._MOST_NUMBERS", rows * 192)
    values = {**QWEN3, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    name = "layers.1.self_attn.k_proj"
    how = {"strategy": "channel", "left_out": (name,)}
    folder = folders(tmp_path, values, compressed("channel", [f"model.{name}"]), **how)
    model = load_model(folder, torch.float32, quantize=quantize)
    by_torch = ExecutionModes(own_tokens=0)
    found = logits(model, KernelPlan(False, by_torch, by_torch))
    torch.testing.assert_close(found, logits(model), atol=1e-4, rtol=1e-4)


def test_random_fp8_weights_are_as_large_as_plain_ones() -> None:
    config = hf_config({**QWEN3, "quantization_config": blocks()})
    down = random_weights(config, torch.bfloat16).layers[0].mlp.down.weight
    assert down.scale is not None
    assert 0.019 < float((down.data.float() * down.scale[0, 0]).std()) < 0.021


@pytest.mark.parametrize(
    "given",
    [
        {"format": WeightFormat.INT4, "zeros": True, "offsets": True},
        {"format": WeightFormat.INT8, "offsets": True},
        {"format": WeightFormat.FP8, "zeros": True},
    ],
    ids=str,
)
def test_a_stored_format_has_zeros_of_one_kind_and_of_int4_alone(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="int4 has one of them, or none, and others have none"):
        StoredFormat(**given)
