"""DecoderWeights from a Hugging Face directory: model.safetensors, else the shards listed in
model.safetensors.index.json.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from photon_ext.errors import ModelError
from photon_ext.models.config import ModelConfig
from photon_ext.models.text_files import check_regular, read_json
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# of the embeddings and the head at a time: neither is in memory as a whole for it
_ROWS_COMPARED = 4096
_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


class _Stored(NamedTuple):
    """Where a tensor is: the file, and its open handle."""

    path: Path
    handle: Any


def load_hf_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Reads every parameter of `config` from `directory`, converted to `dtype` on `device`.

    Raises ModelError, naming the file and the tensor, where a file is missing or damaged, a tensor
    is missing, of another shape or quantized, or where the files hold parameters that the model as
    configured would ignore: a head of its own where config.json ties it to the embeddings is one.
    """
    files = _weight_files(directory)
    expected = {
        name: slot.shape
        for name, slot in weight_slots(config, empty_weights(config, dtype, "meta"))
    }
    with ExitStack() as stack:
        tensors = {name: stored for path in files for name, stored in _open(path, stack).items()}
        _check_names(directory, config, set(tensors), set(expected))
        # before anything is allocated: a damaged size would ask for all the memory there is
        for name, shape in expected.items():
            _check(tensors[name], name, shape)
        if config.tied_embeddings and _HEAD in tensors:
            _check(tensors[_HEAD], _HEAD, expected[_EMBEDDING])
            _check_tied(directory, tensors[_EMBEDDING], tensors[_HEAD], dtype)
        weights = empty_weights(config, dtype, device)
        for name, slot in weight_slots(config, weights):
            _copy(tensors[name], name, slot)
    return weights


def _weight_files(directory: Path) -> list[Path]:
    """The single file where there is one, as transformers does: an index beside it may be left
    over.
    """
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    index_path = directory / INDEX_FILE
    if index_path.exists():
        shards = read_json(index_path).get("weight_map")
        if (
            not isinstance(shards, dict)
            or not shards
            or not all(isinstance(name, str) for name in shards.values())
        ):
            raise ModelError(
                f"{index_path}: has no 'weight_map' object that names a shard for each tensor; "
                "download it again"
            )
        files = [directory / name for name in sorted(set(shards.values()))]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ModelError(
                f"{directory}: {len(missing)} of {len(files)} shards are missing "
                f"({', '.join(missing[:3])}); get them"
            )
        return files
    others = sorted(
        p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors")
    )
    found = (
        f"found {', '.join(others[:4])}, which is not read; convert it to safetensors"
        if others
        else "found no weights; download them"
    )
    raise ModelError(f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}")


def _open(path: Path, stack: ExitStack) -> dict[str, _Stored]:
    check_regular(path)
    try:
        handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return dict.fromkeys(handle.keys(), _Stored(path, handle))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"{path}: {size} bytes that are not a whole safetensors file ({error}); download it "
            "again"
        ) from error


def _check_names(directory: Path, config: ModelConfig, found: set[str], expected: set[str]) -> None:
    missing = sorted(expected - found)
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of {len(expected)} parameters are missing, first "
            f"{missing[0]!r}; "
            f"config.json does not belong to these weights, or shards are missing"
        )
    ignorable = {_HEAD} if config.tied_embeddings else set()
    extra = sorted(
        name for name in found - expected - ignorable if not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise ModelError(
            f"{directory}: {len(extra)} parameters would be ignored, first {extra[0]!r}; "
            "config.json does not belong to these weights, or they are quantized, biased or "
            "adapters"
        )


def _check(stored: _Stored, name: str, expected: torch.Size) -> None:
    described = stored.handle.get_slice(name)
    shape, dtype = described.get_shape(), described.get_dtype()
    if tuple(shape) != tuple(expected):
        raise ModelError(
            f"{stored.path}: {name} has shape {shape}, config.json asks for {list(expected)}; they "
            "do not belong together"
        )
    if dtype not in _DTYPES:
        raise ModelError(
            f"{stored.path}: {name} is stored as {dtype}; use a checkpoint in float32, float16 or "
            "bfloat16"
        )


def _check_tied(directory: Path, embedding: _Stored, head: _Stored, dtype: torch.dtype) -> None:
    """Some checkpoints hold tied embeddings twice.

    They must be equal in the dtype that the model gets: only one of them is read.
    """
    rows = embedding.handle.get_slice(_EMBEDDING).get_shape()[0]
    for start in range(0, rows, _ROWS_COMPARED):
        ours, theirs = (
            _rows(*of, start).to(dtype) for of in ((embedding, _EMBEDDING), (head, _HEAD))
        )
        if not torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"{directory}: config.json says tie_word_embeddings, but {_HEAD} "
                f"({head.path.name}) differs from {_EMBEDDING} and would be "
                f"ignored; set tie_word_embeddings to false in config.json"
            )


def _rows(stored: _Stored, name: str, start: int) -> torch.Tensor:
    try:
        part: torch.Tensor = stored.handle.get_slice(name)[start : start + _ROWS_COMPARED]
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{stored.path}: {name} cannot be read ({error}); download the file again"
        ) from error
    return part


def _copy(stored: _Stored, name: str, slot: torch.Tensor) -> None:
    try:
        tensor = stored.handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{stored.path}: {name} cannot be read ({error}); download the file again"
        ) from error
    slot.copy_(tensor)
