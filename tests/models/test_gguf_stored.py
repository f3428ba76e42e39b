"""GGUF files whose blocks run as they are stored: the logits and tokens of the same numbers in
float32, as the gguf package reads them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from transformers import PreTrainedModel

from photon_ext.dequantize import dequantized
from photon_ext.errors import ModelError
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.loader import LoadedModel, load_model
from photon_ext.models.weights import check_weights, weight_modules
from photon_ext.sampling import SamplingParams
from photon_ext.weight_format import WeightFormat
from tests.engine.test_engine_models import tiny_engine
from tests.models.harness import Chunk, Harness
from tests.models.stored_gguf import FAMILIES, KINDS, write_stored_gguf
from tests.models.tiny import reference_logits
from tests.models.tiny_gguf import TOKENS
from tests.ops.stored import HALVES

IDS = [(11 * i + i // 7) % 131 for i in range(24)]
BOTH = pytest.mark.parametrize("family", FAMILIES)


def logits(model: LoadedModel) -> torch.Tensor:
    """Of a prompt in one step, and of tokens that follow it one by one; of all ids."""
    weights = replace(model.weights, head=replace(model.weights.head, bias=None))
    harness = Harness(model.config, weights)
    found = [harness.prefill([Chunk(1, 0, IDS[:16])])[0]]
    found += [harness.decode([1], [i], [IDS[i]])[0] for i in range(16, 24)]
    return torch.stack(found).cpu()


def formats(model: LoadedModel) -> dict[str, str]:
    """Of the modules of the first layer, the embedding and the head, by the last part of names."""
    return {
        name.rpartition(".")[2]: weight.format.value
        for name, weight in weight_modules(model.weights)
        if "layers.1" not in name
    }


def assert_same_numbers(path: Path, model: PreTrainedModel, device: str = "cpu") -> LoadedModel:
    """On a CPU to the bit, since a kernel reads a block's numbers as they are dequantized."""
    stored = load_model(path, torch.float32, device, "stored")
    plain = load_model(path, torch.float32, device, "none")
    for one in (stored, plain):
        check_weights(one.config, one.weights)
    assert {weight.format for _, weight in weight_modules(plain.weights)} == {WeightFormat.DENSE}
    found = logits(stored)
    tolerance = 0.0 if device == "cpu" else 1e-4
    torch.testing.assert_close(found, logits(plain), atol=tolerance, rtol=tolerance)
    expected = reference_logits(model, IDS)[15:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    return stored


@BOTH
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_give_the_logits_of_the_same_numbers(
    family: str, kind: Kind, tmp_path: Path
) -> None:
    """The families rotate in another order of rows, and have fewer heads of keys than of queries:
    one head is tied, the other has blocks of its own.
    """
    model = write_stored_gguf(family, tmp_path / "m.gguf", lambda name: kind)
    stored = assert_same_numbers(tmp_path / "m.gguf", model)
    assert {weight.format.name for _, weight in weight_modules(stored.weights)} == {kind.name}
    assert stored.weights.tied == (family == "qwen3")
    numbers = sum(one.n * one.k for _, one in weight_modules(stored.weights))
    assert stored.weights.nbytes < 1.1 * numbers * 4 / {"Q8_0": 3.7}.get(kind.name, 4.8)


def test_in_bfloat16_activations_alone_are_rounded(tmp_path: Path) -> None:
    model = write_stored_gguf("llama", tmp_path / "m.gguf", lambda name: Kind.Q4_K)
    loaded = load_model(tmp_path / "m.gguf", torch.bfloat16)
    check_weights(loaded.config, loaded.weights)
    assert {one.format for _, one in weight_modules(loaded.weights)} == {WeightFormat.Q4_K}
    found, expected = logits(loaded).float(), reference_logits(model, IDS)[15:]
    assert (found - expected).norm() < 0.03 * expected.norm()


@BOTH
def test_hazard_c9_rows_of_q_and_k_are_turned_back_by_their_own_heads_and_for_llama_alone(
    family: str, tmp_path: Path
) -> None:
    model = write_stored_gguf(family, tmp_path / "m.gguf", lambda name: Kind.Q5_K)
    file, stored = GgufFile(tmp_path / "m.gguf"), load_model(tmp_path / "m.gguf", torch.float32)
    parameters = dict(model.named_parameters())
    for module, weight in weight_modules(stored.weights):
        assert torch.equal(dequantized(weight), parameters[f"{module}.weight"]), module
    for letter, in_order in (("q", family == "qwen3"), ("k", family == "qwen3"), ("v", True)):
        as_in_file = file.weight(f"blk.1.attn_{letter}.weight").data
        parts = stored.weights.layers[1].attention.qkv.modules()
        loaded = next(one.data for name, one in parts if name.endswith(f"{letter}_proj"))
        assert torch.equal(as_in_file, loaded) == in_order


MIXED = {
    "q_proj": Kind.Q4_K,
    "k_proj": Kind.Q4_K,
    "v_proj": Kind.Q6_K,
    "o_proj": Kind.Q5_0,
    "gate_proj": Kind.Q6_K,
    "up_proj": Kind.Q4_1,
    "down_proj": Kind.Q8_0,  # of 96 columns
    "lm_head": Kind.Q6_K,
    "embed_tokens": Kind.Q4_K,
}


def mixed(**others: Kind | None) -> Callable[[str], Kind | None]:
    kinds = {**MIXED, **others}
    return lambda name: kinds[name.split(".")[-2]]


@pytest.mark.emulated
@BOTH
def test_hazard_c10_parts_of_a_projection_may_differ_in_type(
    family: str, tmp_path: Path, device: str
) -> None:
    """Those that are alike are one matrix. Rows that 256 does not divide have smaller blocks."""
    values = {**FAMILIES[family], "intermediate_size": 96, "tie_word_embeddings": False}
    model = write_stored_gguf(values, tmp_path / "m.gguf", mixed())
    stored = assert_same_numbers(tmp_path / "m.gguf", model, device)
    assert formats(stored) == {name: kind.name.lower() for name, kind in MIXED.items()}
    layer = stored.weights.layers[0]
    rows = [
        [weight.n for weight in one.weights] for one in (layer.attention.qkv, layer.mlp.gate_up)
    ]
    kv = 128 if family == "llama" else 64
    assert rows == [[256 + kv, kv], [96, 96]]


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"q_proj": Kind.Q5_1, "v_proj": Kind.Q4_K}, [256, 256]),
        ({"k_proj": Kind.Q8_0, "v_proj": Kind.Q4_K}, [256, 128, 128]),
    ],
    ids=["the last two are alike", "the first and the last are alike"],
)
def test_hazard_c10_parts_of_a_projection_keep_their_order(
    changed: dict[str, Kind | None], parts: list[int], tmp_path: Path
) -> None:
    model = write_stored_gguf("llama", tmp_path / "m.gguf", mixed(**changed))
    stored = assert_same_numbers(tmp_path / "m.gguf", model)
    assert [one.n for one in stored.weights.layers[0].attention.qkv.weights] == parts


@pytest.mark.parametrize(
    ("tied", "table", "head"),
    [
        (True, Kind.Q6_K, None),
        (True, Kind.Q8_0, None),
        (True, Kind.F16, None),
        (False, Kind.Q4_K, Kind.Q6_K),
        (False, Kind.Q6_K, None),
        (False, None, Kind.Q6_K),
        (False, Kind.IQ4_NL, Kind.Q5_0),
    ],
)
def test_hazard_c11_quantized_embeddings_are_read_as_numbers_and_may_be_the_head(
    tied: bool, table: Kind | None, head: Kind | None, tmp_path: Path
) -> None:
    values = {**FAMILIES["qwen3"], "tie_word_embeddings": tied}
    kind_of = mixed(embed_tokens=table, lm_head=head)
    model = write_stored_gguf(values, tmp_path / "m.gguf", kind_of)
    assert ("output.weight" in GgufFile(tmp_path / "m.gguf").tensor_names) != tied
    weights = assert_same_numbers(tmp_path / "m.gguf", model).weights
    kept = [None if kind in (Kind.F16, Kind.IQ4_NL) else kind for kind in (table, head)]
    names = [kind.name.lower() if kind else "dense" for kind in kept]
    assert weights.embedding.format.value == names[0]
    assert weights.head.weight.format.value == names[0 if tied else 1]
    assert weights.tied == tied


def test_types_that_kernels_do_not_read_are_expanded_beside_those_that_they_do(
    tmp_path: Path,
) -> None:
    plain = {"v_proj": Kind.Q2_K, "down_proj": Kind.IQ4_NL, "up_proj": Kind.F16, "o_proj": None}
    kind_of = mixed(**plain, lm_head=Kind.Q6_K)
    model = write_stored_gguf("llama", tmp_path / "m.gguf", kind_of)
    found = formats(assert_same_numbers(tmp_path / "m.gguf", model))
    assert {name for name, form in found.items() if form == "dense"} == plain.keys()


def test_a_file_without_blocks_that_kernels_read_is_plain(tmp_path: Path) -> None:
    model = write_stored_gguf("llama", tmp_path / "m.gguf", lambda name: Kind.F16)
    assert_same_numbers(tmp_path / "m.gguf", model)
    assert load_model(tmp_path / "m.gguf").config.quantization is None


# --- in an engine ---------------------------------------------------------------------------------


def test_ids_without_a_token_are_never_sampled_from_a_stored_head(tmp_path: Path) -> None:
    write_stored_gguf("qwen3", tmp_path / "m.gguf", lambda name: Kind.Q6_K)
    for depth in (1, 2):
        with tiny_engine(tmp_path / "m.gguf", depth, quantize="stored") as engine:
            params = SamplingParams(30, temperature=1.0, ignore_eos=True)
            (output,) = engine.generate([[3, 4, 5]], params)
        assert set(output.token_ids) <= set(range(len(TOKENS)))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("quantize", [None, "none"])
def test_scales_that_are_not_finite_are_refused_by_name(
    kind: Kind, quantize: str | None, tmp_path: Path
) -> None:
    """Of a block in the middle: each of its numbers in float16."""
    path, form = tmp_path / "m.gguf", WeightFormat[kind.name]
    write_stored_gguf("llama", path, lambda name: kind)
    content = path.read_bytes()
    (tensor,) = [one for one in GGUFReader(path).tensors if one.name == "blk.1.ffn_down.weight"]
    block = int(tensor.data_offset) + 200 * form.bytes
    for at in HALVES[form]:
        for number in (float("inf"), float("-inf"), float("nan")):
            place, half = block + at, struct.pack("<e", number)
            path.write_bytes(content[:place] + half + content[place + 2 :])
            message = r"m\.gguf: blk\.1\.ffn_down\.weight has scales that are not finite; the file"
            with pytest.raises(ModelError, match=message):
                load_model(path, quantize=quantize)
    path.write_bytes(content)
    load_model(path, quantize=quantize)


def test_a_file_for_processors_of_the_other_order_of_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gguf package reads its tensors as if they were of this one."""
    order = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter
    monkeypatch.setattr(gguf, "GGUFWriter", lambda *given: writer(*given, endianess=order))
    write_stored_gguf("llama", tmp_path / "m.gguf", lambda name: Kind.Q8_0)
    for quantize in (None, "none"):
        with pytest.raises(
            ModelError, match=r"m\.gguf: its numbers have the bytes of another kind"
        ):
            load_model(tmp_path / "m.gguf", quantize=quantize)
