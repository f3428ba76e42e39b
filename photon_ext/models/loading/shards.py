"""Which safetensors files hold a model's weights: one, or shards and their index."""

from __future__ import annotations

from pathlib import Path

from photon_ext.errors import ModelError, shown
from photon_ext.models.text.text_files import present, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[str]:
    """The names of the files that hold the weights, whether they are there or not.

    Raises ModelError: the index is damaged.
    """
    if present(directory / SINGLE_FILE) or not present(directory / INDEX_FILE):
        return [SINGLE_FILE]
    return sorted(set(weight_map(directory / INDEX_FILE).values()))


def weight_map(path: Path) -> dict[str, str]:
    """Tensor to shard, each a plain name: what an index says must not lead out of its directory."""
    places = read_json(path).get("weight_map")
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(name, str) for name in places.values())
    ):
        raise ModelError(
            f"{path}: has no 'weight_map' object that names a shard for each tensor; download it "
            "again"
        )
    for tensor, shard in places.items():
        if shard in ("", ".", "..") or shard != Path(shard).name:
            raise ModelError(
                f"{path}: places {shown(tensor)} in {shown(shard)}, expected the name of a file in "
                "the same directory"
            )
    return places
