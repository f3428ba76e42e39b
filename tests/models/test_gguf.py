"""GGUF files: the same parameters as the model they were converted from, and clear errors."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from photon_ext.errors import ModelError
from photon_ext.models.config import RopeScaling
from photon_ext.models.loading.gguf_config import gguf_config
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.gguf_reader import GgufReader
from photon_ext.models.loading.gguf_weights import load_gguf_weights
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.loader import load_model
from photon_ext.models.rope import inverse_frequencies
from photon_ext.models.weights import weight_slots
from tests.models.tiny import TINY, tiny_model
from tests.models.tiny_gguf import write_tiny_gguf

UNBIASED = [name for name in TINY if "biased" not in name]


@pytest.mark.parametrize("name", UNBIASED)
def test_parameters_equal_the_original(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    write_tiny_gguf(model, tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf")
    reference = hf_config(model.config.to_dict())
    assert replace(loaded.config, rms_eps=reference.rms_eps, eos_ids=()) == replace(
        reference, rope_scaling=RopeScaling(), eos_ids=(), prefers_float32=True
    )
    assert loaded.config.rms_eps == pytest.approx(reference.rms_eps)
    parameters = dict(model.named_parameters())
    for key, slot in weight_slots(loaded.weights):
        assert torch.equal(slot, parameters.pop(key)), key
    assert not parameters
    assert loaded.config.eos_ids == (1,)


def test_a_vocabulary_is_read_without_a_look_up_for_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes seconds for the hundred thousand texts of a model, and the garbage
    collector is slowed by what it has to follow.
    """
    texts, looks = [f"text{i} é" for i in range(1000)], 0
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_array("some.texts", texts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    get = GgufReader._get

    def counted(self: GgufReader, *given: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        return get(self, *given, **named)

    monkeypatch.setattr(GgufReader, "_get", counted)
    before = len(gc.get_objects())
    reader = GgufReader(tmp_path / "words.gguf")
    followed = len(gc.get_objects()) - before
    assert reader.metadata()["some.texts"] == texts
    assert looks < 100
    assert followed < 500


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    model = tiny_model("llama-plain")
    factors = torch.tensor([1.0, 1, 1.5, 2, 4, 8, 8, 8])
    write_tiny_gguf(model, tmp_path / "m.gguf", rope_factors=factors)
    config = gguf_config(GgufFile(tmp_path / "m.gguf"))
    plain = inverse_frequencies(replace(config, rope_scaling=RopeScaling()))
    assert torch.equal(inverse_frequencies(config), plain / factors)


@pytest.mark.parametrize("keep", [2, 100, 2000, -5000])
def test_a_file_cut_short_says_so(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny_model("llama-plain"), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ModelError, match=r"m\.gguf: (damaged or cut short|starts with .* not a GGUF file)"
    ):
        load_model(path)


def test_a_version_of_another_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny_model("llama-plain"), path)
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + path.read_bytes()[8:])
    with pytest.raises(
        ModelError,
        match=r"m\.gguf: GGUF version 99, but gguf reads \[2, 3\]; convert the model again",
    ):
        load_model(path)


def test_a_foreign_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"\x89PNG" * 50)
    with pytest.raises(ModelError, match=r"m\.gguf: starts with b'\\x89PNG', expected b'GGUF'"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tokenizer.ggml.model": "llama"},
            "tokenizer 'llama'.*use the model's Hugging Face directory",
        ),
        ({"tokenizer.ggml.pre": "invented"}, "pre-tokenizer 'invented' is not supported"),
    ],
)
def test_unsupported_metadata_is_named(
    fields: dict[str, str], message: str, tmp_path: Path
) -> None:
    model = tiny_model("llama-plain")
    write_tiny_gguf(model, tmp_path / "m.gguf", fields)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "m.gguf")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama-plain")
    write_tiny_gguf(model, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    config = gguf_config(file)
    with pytest.raises(
        ModelError, match=r"9 of \d+ tensors are missing, first 'blk\.3\.attn_k\.weight'"
    ):
        load_gguf_weights(file, replace(config, layers=4))
    with pytest.raises(
        ModelError, match=r"9 tensors would be ignored, first 'blk\.2\.attn_k\.weight'"
    ):
        load_gguf_weights(file, replace(config, layers=2))
    with pytest.raises(
        ModelError, match=r"ffn_gate\.weight has shape \[45, 64\], its metadata asks for \[46, 64\]"
    ):
        load_gguf_weights(file, replace(config, intermediate=46))
