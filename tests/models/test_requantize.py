"""`quantize=`: the weights of a model of any source in the formats that it says, near what the
source has, as large as the formats say; and clear errors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from photon_ext.dequantize import dequantized
from photon_ext.engine import Engine
from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.loading import placing
from photon_ext.models.loading.loader import LoadedModel, load_model
from photon_ext.models.loading.round_to_nearest import fp8_rows, int4_groups
from photon_ext.models.weights import check_weights, other_slots, weight_modules
from photon_ext.weight import Weight
from photon_ext.weight_format import WeightFormat
from tests.cli.command import run
from tests.models.stored_fp8 import blocks, compressed, store_fp8
from tests.models.stored_gguf import write_stored_gguf
from tests.models.test_gguf_stored import logits
from tests.models.test_int4_model import SCHEMES, store_int4
from tests.models.test_quantization import QWEN3
from tests.models.tiny import saved_random_model, saved_tiny_model

# Of logits, relative: weights are random, so that errors of three layers come together.
MOST_ERROR = {"none": 1e-5, "fp8": 0.2, "int4": 0.7}


def plain(folder: Path) -> Path:
    saved_random_model(QWEN3, folder / "plain")
    return folder / "plain"


def tied(folder: Path) -> Path:
    saved_random_model({**QWEN3, "tie_word_embeddings": True}, folder / "plain")
    return folder / "plain"


def fp8(folder: Path) -> Path:
    plain(folder)
    store_fp8(folder / "plain", folder / "fp8", blocks(["lm_head"]))
    return folder / "fp8"


def int4(folder: Path) -> Path:
    store_int4(QWEN3, folder, *SCHEMES["awq"])
    return folder / "int4"


def gguf(folder: Path) -> Path:
    write_stored_gguf("llama", folder / "m.gguf", lambda name: Kind.Q8_0)
    return folder / "m.gguf"


SOURCES: dict[str, Callable[[Path], Path]] = {
    one.__name__: one for one in (plain, tied, fp8, int4, gguf)
}
STORED = {"plain": "dense", "tied": "dense", "fp8": "fp8", "int4": "int4", "gguf": "q8_0"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in SOURCES.items()}


def group_of(weight: Weight) -> int:
    """Columns of int4 that share a scale."""
    return next(size for size in (128, 64, 32) if weight.k % size == 0)


def nbytes(weight: Weight) -> int:
    """By the format, of a model in float32."""
    numbers = weight.n * weight.k
    if weight.format is WeightFormat.FP8:
        return numbers + 4 * weight.n
    if weight.format is WeightFormat.INT4:
        return numbers // 2 + 2 * numbers // group_of(weight)
    return 4 * numbers


def rounded(numbers: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The numbers that `weight` has, if it was rounded from these."""
    if weight.format is WeightFormat.FP8:
        data, scale = fp8_rows(numbers)
    elif weight.format is WeightFormat.INT4:
        data, scale = int4_groups(numbers, group_of(weight))
    else:
        return numbers
    return dequantized(Weight(data, weight.format, scale))


@pytest.mark.parametrize("quantize", ["none", "fp8", "int4"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_rounded_to_what_is_asked(
    source: str, quantize: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each linear to it, the head to fp8, embeddings only where they are the head; some rows after
    the other, as large ones are.
    """
    monkeypatch.setattr(placing, "_NUMBERS", 1)
    found = load_model(paths[source], torch.float32, quantize=quantize)
    stored = load_model(paths[source], torch.float32, quantize="stored")
    check_weights(found.config, found.weights)
    modules = weight_modules(found.weights), weight_modules(stored.weights)
    for (module, weight), (_, before) in zip(*modules, strict=True):
        form = "dense" if quantize == "none" else quantize
        if module == "lm_head" or (source == "tied" and module == "model.embed_tokens"):
            form = "dense" if quantize == "none" else "fp8"
        elif module == "model.embed_tokens":
            form = "dense"
        assert weight.format.value == form, module
        assert torch.equal(dequantized(weight), rounded(dequantized(before), weight)), module
    size = sum(nbytes(weight) for _, weight in weight_modules(found.weights))
    size += sum(slot.nbytes for _, slot in other_slots(found.weights))
    bias = found.weights.head.bias
    assert found.weights.nbytes == size + (0 if bias is None else bias.nbytes)
    expected = logits(stored)
    assert (logits(found) - expected).norm() < MOST_ERROR[quantize] * expected.norm()


@pytest.mark.parametrize("source", SOURCES)
def test_stored_is_what_the_file_has_and_what_a_cpu_gets_unasked(
    source: str, paths: dict[str, Path]
) -> None:
    found = [load_model(paths[source], torch.float32, quantize=one) for one in ("stored", None)]
    assert found[0].config == found[1].config
    for loaded in found:
        down = loaded.weights.layers[0].mlp.down.weight
        assert down.format.value == STORED[source]
    for one, other in zip(*(model.weights.tensors() for model in found), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_what_is_in_fp8_rows_already_stays_as_it_is(tmp_path: Path) -> None:
    plain(tmp_path)
    scheme = compressed("channel")
    store_fp8(tmp_path / "plain", tmp_path / "fp8", scheme, "channel")
    found = [load_model(tmp_path / "fp8", quantize=one).weights for one in (None, "fp8")]
    for one, other in zip(*(weights.layers for weights in found), strict=True):
        pairs = zip(one.mlp.down.weight.tensors(), other.mlp.down.weight.tensors(), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_rows_that_no_group_divides_are_in_fp8(quantize: str, tmp_path: Path) -> None:
    """Of 42, 45 and 144 columns; rows of 64 are one group."""
    for name, groups in (("qwen3-6-3-24", set()), ("llama-plain", {64})):
        saved_tiny_model(name, tmp_path / name)
        found = load_model(tmp_path / name, torch.float32, quantize=quantize)
        check_weights(found.config, found.weights)
        columns = {
            weight.k // weight.scale.shape[1]
            for _, weight in weight_modules(found.weights)
            if weight.format is WeightFormat.INT4 and weight.scale is not None
        }
        assert columns == (groups if quantize == "int4" else set())
        expected = load_model(tmp_path / name, torch.float32)
        error = (logits(found) - logits(expected)).norm() / logits(expected).norm()
        assert error < MOST_ERROR[quantize], name


def test_hazard_c5_rounded_parts_of_a_projection_keep_their_own_scales(tmp_path: Path) -> None:
    """Of magnitudes 1:100: each is as near as if it were alone."""
    path = plain(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    small = {name: 0.01 * one for name, one in tensors.items() if "k_proj" in name}
    save_file({**tensors, **small}, path)
    for quantize, most in (("fp8", 0.04), ("int4", 0.15)):
        qkv = load_model(tmp_path / "plain", quantize=quantize).weights.layers[1].attention.qkv
        assert len(qkv.weights) == 1
        for module, weight in qkv.modules():
            expected = {**tensors, **small}[f"model.layers.1.{module}.weight"]
            error = (dequantized(weight) - expected).norm() / expected.norm()
            assert error < most, module


def test_several_threads_may_load_at_once(paths: dict[str, Path]) -> None:
    def load(source: str) -> LoadedModel:
        return load_model(paths[source], torch.float32, quantize="int4")

    names = ["gguf", "plain"] * 3
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(load, names))
    for first, *others in (found[::2], found[1::2]):
        for other in others:
            pairs = zip(first.weights.tensors(), other.weights.tensors(), strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["int8", "INT4", "", 4, True, ["int4"]])
def test_other_values_are_refused_with_those_that_are_known(
    wrong: Any, paths: dict[str, Path]
) -> None:
    message = r"quantize is .*; give 'stored' .*, 'none' .*, 'fp8' or 'int4'"
    with pytest.raises(ConfigError, match=message):
        load_model(paths["plain"], quantize=wrong)
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained("nowhere", device="cpu", quantize=wrong)


def test_the_command_line_refuses_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "hello", "--quantize", "int8")
    assert code == 2
    assert "argument --quantize: invalid choice: 'int8' (choose from " in err


def test_a_plan_is_of_the_weights_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "info", "--plan", "qwen3-0.6b", "--device", "h200", "--quantize", "int4"
    )
    assert (code, err) == (0, "")
    assert out.startswith("qwen3-0.6b in bfloat16, weights in fp8, int4 on h200: backend ")
    code, _, err = run(capsys, "info", "--quantize", "int4")
    assert code == 2
    assert "--quantize: without --plan MODEL there is nothing to choose" in err


@pytest.mark.parametrize(
    ("source", "stored"),
    [("gguf", "weights in q8_0"), ("fp8", "fp8 weights, scales one a block of 128 x 128")],
)
def test_a_plan_of_a_file_is_of_its_weights_where_they_are_kept(
    source: str, stored: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unasked they are expanded, as an engine does on a GPU that has room for it."""
    plan = ("info", "--plan", str(paths[source]), "--device", "h200", "--dtype", "bfloat16")
    _, out, _ = run(capsys, *plan, "--quantize", "stored")
    assert out.startswith(f"{paths[source]} in bfloat16, {stored} on h200: backend ")
    plain = [run(capsys, *plan, *more)[1] for more in ((), ("--quantize", "none"))]
    assert plain[0] == plain[1]
    line = f"{paths[source]} in bfloat16, expanded from {stored} on h200: backend hopper"
    assert plain[0].startswith(line)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_cannot_be_rounded_name_file_tensor_and_place(
    number: float, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_NUMBERS", 1)  # 128 rows at a time
    path = plain(tmp_path) / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.down_proj.weight"
    tensors[name][157, 3] = number
    save_file(tensors, path)
    message = rf"plain/model\.safetensors: {name}: the weight is {number} at row 157, column 3; "
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "plain", quantize=quantize)
    load_model(tmp_path / "plain")
    model = write_stored_gguf("llama", tmp_path / "m.gguf", lambda name: None)
    row = model.model.layers[1].mlp.down_proj.weight.detach()[9].numpy().tobytes()
    content = (tmp_path / "m.gguf").read_bytes()
    wrong = torch.tensor([number] * 256).numpy().tobytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(row, wrong))
    message = rf"m\.gguf: blk\.1\.ffn_down\.weight: the weight is {number} at row 9, column 0; "
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "m.gguf", quantize=quantize)


def test_numbers_too_large_for_scales_in_float16_name_their_tensor(tmp_path: Path) -> None:
    path = plain(tmp_path) / "model.safetensors"
    tensors, name = load_file(path), "model.layers.2.self_attn.o_proj.weight"
    tensors[name][7, 3] = 1e6
    save_file(tensors, path)
    message = rf"{name}: int4: the weight has a number of magnitude 1e\+06"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "plain", quantize="int4")
    load_model(tmp_path / "plain", quantize="fp8")
