"""Links that lead nowhere.

An incomplete copy or cache is told, and not taken for a model without that file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from photon_ext.errors import ModelError
from photon_ext.models.loading.loader import load_model, resolve_model
from tests.models.test_tokenizer import saved_tokenizer
from tests.models.tiny import saved_tiny_model

FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "m.gguf",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model."""
    saved_tiny_model("llama-plain", tmp_path / "model")
    saved_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    return tmp_path / "model"


@pytest.mark.parametrize("file", FILES)
def test_a_dangling_link_is_no_missing_file(file: str, folder: Path) -> None:
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    if file == "m.gguf":
        (folder / "config.json").unlink()
    path, target = folder / file, folder.parent / "blobs" / "gone"
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    with pytest.raises(ModelError) as raised:
        load_model(folder)
    assert (
        str(raised.value)
        == f"{path}: is a link to {target}, which is not there; get that file, or remove the link"
    )
    target.parent.mkdir()
    target.symlink_to(target)  # a circle
    with pytest.raises(ModelError, match="is a link to"):
        load_model(folder)


def test_a_model_that_is_a_dangling_link_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"model: is a link to .*gone, which is not there"):
        resolve_model(tmp_path / "model")


def test_links_that_lead_somewhere_are_followed(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    loaded = load_model(folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template is not None
    assert loaded.config.eos_ids == (2, 9, 1)
