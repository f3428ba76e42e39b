"""Loading weights: equal to transformers' parameters, and clear errors for files that are
missing, cut short or foreign.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from photon_ext.dequantize import dequantized
from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.hf_weights import load_hf_weights
from photon_ext.models.requantize import in_groups, requantized
from photon_ext.models.shapes import in_q4_k_m, in_q8_0
from photon_ext.models.weights import check_weights, random_weights, weight_modules, weight_slots
from photon_ext.weight import Weight
from tests.models.tiny import TINY, saved_tiny_model

CONFIG = ModelConfig(Family.QWEN3, 32, 2, 4, 2, 8, 48, 64)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_config(folder: Path) -> ModelConfig:
    return hf_config(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_arrives(name: str, tmp_path: Path) -> None:
    model = saved_tiny_model(name, tmp_path)
    config = read_config(tmp_path)
    weights = load_hf_weights(tmp_path, config, torch.float32)
    parameters = dict(model.named_parameters())
    slots = dict(weight_slots(weights))
    assert slots.keys() == parameters.keys()
    for key, slot in slots.items():
        assert torch.equal(slot, parameters[key]), key
    assert weights.nbytes == sum(parameter.nbytes for parameter in parameters.values())
    assert weights.tied == config.tied_embeddings


def test_fused_projections_hold_their_parts_in_order(tmp_path: Path) -> None:
    model = saved_tiny_model("qwen3-6-3-24", tmp_path)
    layer = load_hf_weights(tmp_path, read_config(tmp_path), torch.float32).layers[1]
    reference = model.model.layers[1]
    attention, mlp = reference.self_attn, reference.mlp
    qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    assert torch.equal(layer.attention.qkv.weight.data, qkv)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(layer.mlp.gate_up.weight.data, gate_up)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path / "one")
    saved_tiny_model("llama-plain", tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one = load_hf_weights(tmp_path / "one", read_config(tmp_path / "one"), torch.float32)
    many = load_hf_weights(tmp_path / "many", read_config(tmp_path / "many"), torch.float32)
    for a, b in zip(one.tensors(), many.tensors(), strict=True):
        assert torch.equal(a, b)


def test_a_single_file_goes_before_shards_as_in_transformers(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path, seed=1, max_shard_size="60KB")
    shards = {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if "safetensors" in path.name
    }
    model = saved_tiny_model("llama-plain", tmp_path, seed=2)
    for name, content in shards.items():
        (tmp_path / name).write_bytes(content)
    assert (tmp_path / INDEX).exists()
    embedding = load_hf_weights(tmp_path, read_config(tmp_path), torch.float32).embedding.data
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(embedding, theirs.model.embed_tokens.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_conversion_rounds_once(dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved_tiny_model("llama-plain", tmp_path)
    weights = load_hf_weights(tmp_path, read_config(tmp_path), dtype)
    assert {tensor.dtype for tensor in weights.tensors()} == {dtype}
    down = model.model.layers[0].mlp.down_proj.weight.to(dtype)
    assert torch.equal(weights.layers[0].mlp.down.weight.data, down)


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / SINGLE)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / SINGLE)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    saved_tiny_model("qwen3-tied", tmp_path)
    return tmp_path


def test_a_head_that_repeats_the_embeddings_is_not_missed(tied: Path) -> None:
    embedding = load_file(tied / SINGLE)["model.embed_tokens.weight"]
    embedding[3, 5] = torch.nan  # damage, but the same twice
    change_tensors(tied, model__embed_tokens__weight=embedding, lm_head__weight=embedding.clone())
    weights = load_hf_weights(tied, read_config(tied), torch.float32)
    assert weights.tied
    change_tensors(tied, lm_head__weight=embedding.to(torch.bfloat16))
    load_hf_weights(tied, read_config(tied), torch.bfloat16)


@pytest.mark.parametrize("rows", [4, 4096])
def test_a_head_of_its_own_is_not_dropped_for_tied_embeddings(
    rows: int, tied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon_ext.models.loading.hf_weights._ROWS_COMPARED", rows)
    head = load_file(tied / SINGLE)["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    change_tensors(tied, lm_head__weight=head)
    with pytest.raises(ModelError) as raised:
        load_hf_weights(tied, read_config(tied), torch.float32)
    assert str(raised.value) == (
        f"{tied}: config.json says tie_word_embeddings, but lm_head.weight (model.safetensors) "
        "differs from model.embed_tokens.weight "
        "and would be ignored; set tie_word_embeddings to false in config.json"
    )
    untied = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tied / "config.json").write_text(json.dumps(untied))  # the advice
    weights = load_hf_weights(tied, read_config(tied), torch.float32)
    assert torch.equal(weights.head.weight.data, head)


def test_a_head_of_another_shape_is_named_where_embeddings_are_tied(tied: Path) -> None:
    change_tensors(tied, lm_head__weight=torch.zeros(7, 64))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight has shape \[7, 64\], config\.json asks for \[131, 64\]"
    ):
        load_hf_weights(tied, read_config(tied), torch.float32)


def store_as(path: Path, name: str, dtype: str, size: int) -> None:
    """Rewrites a file so that one tensor's header says another dtype; `size`: bytes that its
    elements take in it.
    """
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kept, blobs, place = {}, [], 0
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        blob = data[slice(*entry["data_offsets"])]
        if key == name:
            entry["dtype"], blob = dtype, bytes(size)
        kept[key] = {**entry, "data_offsets": [place, place + len(blob)]}
        blobs.append(blob)
        place += len(blob)
    text = json.dumps(kept).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def test_a_dtype_that_torch_does_not_know_is_named_with_file_and_tensor(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    store_as(tmp_path / SINGLE, "model.norm.weight", "F6_E2M3", 64 * 6 // 8)
    told = r"model\.safetensors: model\.norm\.weight is stored as F6_E2M3; use a checkpoint in fl"
    with pytest.raises(ModelError, match=told):
        load_hf_weights(tmp_path, read_config(tmp_path))


def other_norm(norm: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda path: change_tensors(path.parent, model__norm__weight=norm)


def index_alone(text: str) -> Callable[[Path], object]:
    return lambda path: path.rename(path.parent / INDEX).write_text(text)


NOT_WHOLE = r"bytes that are not a whole safetensors file"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 9000), rf"model\.safetensors: 9000 {NOT_WHOLE}"),
        (lambda path: path.write_bytes(b"PK\x03\x04 an archive" * 100), rf"s: \d+ {NOT_WHOLE}"),
        (lambda path: path.write_bytes(b""), rf"model\.safetensors: 0 {NOT_WHOLE}"),
        (Path.unlink, r"expected model\.safetensors or .*found no weights; download them"),
        (
            lambda path: path.rename(path.parent / "pytorch_model.bin"),
            r"found pytorch_model\.bin, which is not read; convert it",
        ),
        (other_norm(None), r"1 of \d+ parameters are missing, first 'model\.norm\.weight'"),
        (
            other_norm(torch.ones(63)),
            r"model\.norm\.weight has shape \[63\], config\.json asks for \[64\]",
        ),
        (
            other_norm(torch.ones(64, dtype=torch.int8)),
            r"model\.norm\.weight is stored as I8; use",
        ),
        (
            lambda path: change_tensors(path.parent, **{Q_BIAS: torch.zeros(64)}),
            rf"1 parameters would be ignored, first '{Q_BIAS}'",
        ),
        (index_alone("{}"), r"index\.json: has no 'weight_map'"),
        (index_alone("{"), r"index\.json: not a readable JSON file"),
        (
            index_alone('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
            r"1 of 1 shards are missing \(model-00001-of-00002\.safetensors\)",
        ),
    ],
)
def test_broken_directories_say_what_is_wrong(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    damage(tmp_path / SINGLE)
    with pytest.raises(ModelError, match=message):
        load_hf_weights(tmp_path, read_config(tmp_path))


def test_random_weights_repeat_by_seed() -> None:
    first, again, other = (random_weights(CONFIG, torch.float32, "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), again.tensors(), strict=True))
    assert not torch.equal(first.embedding.data, other.embedding.data)
    assert torch.equal(first.head.norm, torch.ones(32))
    assert first.layers[0].attention.qkv.weight.data.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("quantized", [in_q4_k_m, in_q8_0, partial(requantized, quantize="int4")])
def test_random_integers_have_every_code_and_the_deviation_of_numbers(
    quantized: Callable[[ModelConfig], ModelConfig],
) -> None:
    """Around zero, but for half a step where it has a code."""
    config = replace(CONFIG, hidden=256, head_dim=64, intermediate=256, vocab=512)
    weights = random_weights(in_groups(quantized(config)), torch.bfloat16)
    for module, weight in weight_modules(weights):
        if weight.format.is_int:
            numbers = dequantized(weight)
            assert numbers.std().item() == pytest.approx(0.02, rel=0.05), module
            assert abs(numbers.mean().item()) < 0.004, module
            assert len(weight.data.unique()) == 256, module


def test_weights_that_are_not_contiguous_are_refused_by_name() -> None:
    """A transposed view has the right shape, and failed in an op of the first step."""
    weights = random_weights(CONFIG, torch.float32, "cpu")
    check_weights(CONFIG, weights)
    first, last = weights.layers
    attention = last.attention
    transposed = Weight(attention.o.weight.data.t().contiguous().t())
    attention = replace(attention, o=replace(attention.o, weights=(transposed,)))
    changed = replace(weights, layers=(first, replace(last, attention=attention)))
    with pytest.raises(ConfigError) as raised:
        check_weights(CONFIG, changed)
    assert str(raised.value) == (
        "layers[1].attention.o.weights[0].data of the weights has strides [1, 32], expected a "
        "contiguous tensor, as the kernels read it; give its .contiguous()"
    )
    head = replace(weights.head, norm=torch.ones(64)[::2])
    with pytest.raises(ConfigError, match=r"head\.norm of the weights has strides \[2\]"):
        check_weights(CONFIG, replace(weights, head=head))
    head = replace(weights.head, norm=torch.ones(64)[::2].contiguous())
    check_weights(CONFIG, replace(weights, head=head))


def test_weights_whose_layers_have_settings_of_another_model_are_refused() -> None:
    weights = random_weights(CONFIG, torch.float32, "cpu")
    first, last = weights.layers
    still = replace(last, attention=replace(last.attention, rotates=False))
    with pytest.raises(ConfigError, match=r"layers\[1\]\.attention\.rotates of .* is False, exp"):
        check_weights(CONFIG, replace(weights, layers=(first, still)))
