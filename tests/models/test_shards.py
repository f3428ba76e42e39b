"""Checkpoints of several files.

The index says where each tensor is, and nothing is taken from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_ext.errors import ModelError
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.hf_weights import load_hf_weights
from photon_ext.models.loading.shards import INDEX_FILE
from photon_ext.models.weights import DecoderWeights
from tests.models.tiny import saved_tiny_model

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_tiny_model("llama-plain", tmp_path / "model", max_shard_size="60KB")
    assert len(shards(tmp_path / "model")) > 2
    return tmp_path / "model"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load(folder: Path) -> DecoderWeights:
    return load_hf_weights(folder, hf_config(json.loads((folder / "config.json").read_text())))


def places(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return found


def write_places(folder: Path, **changes: str | None) -> None:
    changed = {
        **places(folder),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    changed = {key: value for key, value in changed.items() if value is not None}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": changed}))


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as raised:
        load(folder)
    return str(raised.value)


def test_a_tensor_that_two_shards_hold_is_refused(folder: Path) -> None:
    """One of them was taken, by the order of names, though the index named the other."""
    other = next(path for path in reversed(shards(folder)) if path.name != places(folder)[NORM])
    save_file({**load_file(other), NORM: torch.zeros(64)}, other)
    message = refused(folder)
    assert message.startswith(
        f"{other}: holds '{NORM}', which {INDEX_FILE} places in '{places(folder)[NORM]}'; "
    )


def test_a_tensor_is_looked_for_where_the_index_places_it(folder: Path) -> None:
    home = places(folder)[NORM]
    other = next(path.name for path in shards(folder) if path.name != home)
    write_places(folder, model__norm__weight=other)
    assert f"holds '{NORM}', which {INDEX_FILE} places in '{other}'" in refused(folder)
    tensors = load_file(folder / home)
    del tensors[NORM]
    save_file(tensors, folder / home)
    assert refused(folder).startswith(
        f"{folder / other}: has no tensor '{NORM}', which {INDEX_FILE} places there; "
    )


def test_a_tensor_that_the_index_does_not_name_is_refused(folder: Path) -> None:
    home = places(folder)[NORM]
    write_places(folder, model__norm__weight=None)
    assert refused(folder).startswith(
        f"{folder / home}: holds '{NORM}', which {INDEX_FILE} does not name; "
    )


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    shard = shards(folder)[0]
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(shard), extra: torch.ones(8)}, shard)
    load(folder)
    write_places(folder, **{extra.replace(".", "__"): shard.name})
    load(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{absolute}", "..", ".", "", "sub/x.safetensors", "./x"]
)
def test_a_shard_outside_the_directory_is_not_read(name: str, folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / places(folder)[NORM]).read_bytes())
    name = name.format(absolute=outside)
    write_places(folder, model__norm__weight=name)
    message = refused(folder)
    assert message == (
        f"{folder / INDEX_FILE}: places '{NORM}' in {name!r}, expected the name of a file in the "
        "same directory"
    ) or (len(name) > 150 and "expected the name of a file in the same directory" in message)


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for index, path in enumerate(shards(folder)):
        path.rename(blobs / str(index))
        path.symlink_to(blobs / str(index))
    load(folder)
    (blobs / "1").unlink()
    link = shards(folder)[1]
    gone = f"{link}: is a link to {blobs / '1'}, which is not there"
    assert refused(folder) == f"{gone}; get that file, or remove the link"


def test_long_names_do_not_make_long_messages(folder: Path) -> None:
    write_places(folder, **{"x" * 100_000: "y" * 100_000 + "/z"})
    assert len(refused(folder)) < 1000 + 2 * len(str(folder))
