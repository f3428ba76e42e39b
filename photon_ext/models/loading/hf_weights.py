"""DecoderWeights from a Hugging Face directory: one file, or shards and their index."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from photon_ext.errors import ModelError, shortened, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.expected import AGAIN, PLAIN, Expected
from photon_ext.models.loading.folding import folded, folded_weight
from photon_ext.models.loading.hf_quantization import ACTIVATION_SCALES
from photon_ext.models.loading.int4_config import Int4Scheme
from photon_ext.models.loading.module_reader import module_reader
from photon_ext.models.loading.placing import place
from photon_ext.models.loading.progress import counted
from photon_ext.models.loading.shards import INDEX_FILE, SINGLE_FILE, weight_map
from photon_ext.models.quantization import Fp4Scheme, Quantization
from photon_ext.models.text.text_files import check_regular, present
from photon_ext.models.weights import (
    DecoderWeights,
    empty_weights,
    other_slots,
    weight_modules,
)
from photon_ext.weight import Weight

_LEFT_OUT = "if the file is right, name its module there among those that are left out"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_COMPARED = (
    4096  # of the embeddings and the head at a time: neither is in memory as a whole for it
)
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")
# Some old checkpoints hold the rotary frequencies, which the config gives too.
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_IGNORED = ("rotary_emb.inv_freq",)


class _Stored(NamedTuple):
    """Where a tensor is: the file, and its open handle."""

    path: Path
    handle: Any


def load_hf_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    quantization: Quantization | None = None,
) -> DecoderWeights:
    """Reads every parameter of `config` from `directory`: in `dtype` on `device`, or as
    `config.quantization` has it. `quantization`: how the files store them.

    Raises ModelError, naming the file and the tensor, where a file is missing or damaged, a tensor
    is missing, of another shape, stored otherwise than the config says, or not in the shard that
    the index names, where a weight with scales or a scale is not finite, or where the files hold
    parameters that the model as configured would ignore: a head of its own where config.json ties
    it to the embeddings is one.
    """
    with ExitStack() as stack:
        files = _Files(directory, _open_all(directory, stack), quantization)
        # before anything is allocated: a damaged size would ask for all the memory there is
        files.check(config, empty_weights(config, dtype, "meta"), dtype)
        weights = empty_weights(config, dtype, device)
        what = f"loading {config.quantization or 'weights'}"
        for module, to in counted(list(weight_modules(weights)), what):
            weight, source = files.weight(module, to)
            place(to, folded_weight(config, module, weight), source)
        for name, slot in other_slots(weights):
            slot.copy_(folded(config, name.rpartition(".")[0], files.tensor(name)))
    return weights


def as_in_files(directory: Path, config: ModelConfig) -> ModelConfig:
    """The model as its files store it: scales of four-bit weights have the files' dtype. Where a
    family multiplies weights as they are loaded (residual_multiplier), scales of int4 become
    float32, and fp4 gets a float32 divisor a row.
    """
    scheme = config.quantization
    if isinstance(scheme, Fp4Scheme) and config.residual_multiplier != 1:
        return replace(config, quantization=replace(scheme, divides=True))
    if not isinstance(scheme, Int4Scheme):
        return config
    with ExitStack() as stack:
        tensors = _open_all(directory, stack)
        names = [name for name in tensors if name.endswith((".scales", ".weight_scale"))]
        stored = {tensors[name].handle.get_slice(name).get_dtype() for name in names}
    exact = {"F16": "float16", "BF16": "bfloat16"} if config.residual_multiplier == 1 else {}
    scheme = replace(scheme, scale_dtype=exact.get("".join(stored), "float32"))
    return replace(config, quantization=scheme)


class _Files:
    """The tensors of a directory, by their names."""

    def __init__(
        self, directory: Path, tensors: dict[str, _Stored], quantization: Quantization | None
    ) -> None:
        self._directory, self._tensors = directory, tensors
        self._quantization = quantization

    def check(self, config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype) -> None:
        """Raises ModelError unless they are those of these weights, of which nothing is read."""
        expected = {name: Expected(tuple(slot.shape)) for name, slot in other_slots(weights)}
        for module, weight in weight_modules(weights):
            reader = module_reader(self._quantization, module)
            expected |= reader.expected(module, weight.n, weight.k)
        self._check_names(config, set(expected))
        for name, wanted in expected.items():
            _check(self._tensors[name], name, wanted)
        if config.tied_embeddings and _HEAD in self._tensors:
            head, table = self._tensors[_HEAD], self._tensors[_EMBEDDING]
            _check(head, _HEAD, expected[_EMBEDDING])
            _check_tied(self._directory, table, head, dtype)

    def tensor(self, name: str) -> torch.Tensor:
        return _read(self._tensors[name], name)

    def weight(self, module: str, slot: Weight) -> tuple[Weight, str]:
        """As the files store it, with the file and the tensor in words."""
        reader = module_reader(self._quantization, module)
        names = list(reader.expected(module, slot.n, slot.k))
        tensors = {name.rpartition(".")[2]: self.tensor(name) for name in names}
        path = self._tensors[names[0]].path
        return reader.weight(tensors, path, module), f"{path}: {names[0]}"

    def _is_zero_bias(self, name: str) -> bool:
        """Of a linear that has none: old GPTQ files hold such biases."""
        is_bias = isinstance(self._quantization, Int4Scheme) and name.endswith(".bias")
        is_plain = is_bias and self._tensors[name].handle.get_slice(name).get_dtype() in PLAIN
        return is_plain and not bool(self.tensor(name).any())

    def _why_missing(self, name: str) -> str:
        module = name.rpartition(".")[0]
        plain = self._tensors.get(f"{module}.weight")
        if plain and plain.handle.get_slice(f"{module}.weight").get_dtype() in PLAIN:
            return (
                f"{module}.weight is plain, and quantization_config of config.json says otherwise: "
                "name the module there among those that are left out"
            )
        packed = [one for one in self._tensors if one.endswith(_PACKED)]
        if self._quantization is None and packed:
            return (
                f"{packed[0]!r} is of a quantized weight, and config.json has no "
                "quantization_config: use a checkpoint whose config.json has it"
            )
        return "config.json does not belong to these weights, or shards are missing"

    def _check_names(self, config: ModelConfig, expected: set[str]) -> None:
        directory, found = self._directory, set(self._tensors)
        missing = sorted(expected - found)
        if missing:
            raise ModelError(
                f"{directory}: {len(missing)} of {len(expected)} parameters are missing, first "
                f"{missing[0]!r}; {self._why_missing(missing[0])}"
            )
        ignorable = {_HEAD} if config.tied_embeddings else set()
        ignored = _IGNORED if self._quantization is None else (*_IGNORED, *ACTIVATION_SCALES)
        extra = sorted(name for name in found - expected - ignorable if not name.endswith(ignored))
        extra = [name for name in extra if not self._is_zero_bias(name)]
        if extra:
            raise ModelError(
                f"{directory}: {len(extra)} parameters would be ignored, first {shown(extra[0])}; "
                "config.json does not belong to these weights, or they are quantized, biased or "
                "adapters"
            )


def _open_all(directory: Path, stack: ExitStack) -> dict[str, _Stored]:
    """The single file where there is one, as transformers does.

    An index beside it may be left over.
    """
    if present(directory / SINGLE_FILE):
        return _open(directory / SINGLE_FILE, stack)
    if present(directory / INDEX_FILE):
        return _open_shards(directory, stack)
    others = sorted(p.name for p in directory.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    if others:
        names = shortened(", ".join(others[:4]))
        found = f"found {names}, which is not read; convert it to safetensors"
    else:
        found = "found no weights; download them"
    raise ModelError(f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}")


def _open_shards(directory: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Each tensor from the shard that the index names for it, and from no other."""
    places = weight_map(directory / INDEX_FILE)
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not present(directory / name)]
    if missing:
        names = shortened(", ".join(missing[:3]))
        raise ModelError(
            f"{directory}: {len(missing)} of {len(shards)} shards are missing ({names}); get them"
        )
    tensors: dict[str, _Stored] = {}
    for shard in shards:
        for name, stored in _open(directory / shard, stack).items():
            if places.get(name) == shard:
                tensors[name] = stored
            elif not name.endswith(_IGNORED):
                place = f"places in {shown(places[name])}" if name in places else "does not name"
                raise ModelError(
                    f"{directory / shard}: holds {shown(name)}, which {INDEX_FILE} {place}; "
                    "the files belong to two models, download them again"
                )
    absent = next((name for name in places if name not in tensors), None)
    if absent is not None:
        raise ModelError(
            f"{directory / places[absent]}: has no tensor {shown(absent)}, which {INDEX_FILE} "
            "places there; "
            "the files belong to two models, download them again"
        )
    return tensors


def _open(path: Path, stack: ExitStack) -> dict[str, _Stored]:
    check_regular(path)
    try:
        handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return dict.fromkeys(handle.keys(), _Stored(path, handle))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"{path}: {size} bytes that are not a whole safetensors file "
            f"({shortened(str(error))}); download it again"
        ) from error


def _check(stored: _Stored, name: str, expected: Expected) -> None:
    described = stored.handle.get_slice(name)
    shape, dtype = described.get_shape(), described.get_dtype()
    if not expected.has(shape):
        raise ModelError(
            f"{stored.path}: {name} has shape {shown(shape)}, config.json asks for "
            f"{list(expected.shape)}; they do not belong together"
        )
    if dtype in expected.dtypes:
        return
    told, is_weight = f"{stored.path}: {name} is stored as {dtype}", name.endswith(".weight")
    if expected.dtypes == PLAIN and (is_weight or name.endswith(".bias")):
        raise ModelError(f"{told}; use a checkpoint in float32, float16 or bfloat16")
    remedy = _LEFT_OUT if is_weight and dtype in PLAIN else AGAIN
    asked = f"quantization_config of config.json says {' or '.join(expected.dtypes)}"
    raise ModelError(f"{told}, and {asked}; {remedy}")


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
            f"{stored.path}: {name} cannot be read ({shortened(str(error))}); download the file "
            "again"
        ) from error
    return part


def _read(stored: _Stored, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = stored.handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{stored.path}: {name} cannot be read ({shortened(str(error))}); download the file "
            "again"
        ) from error
    return tensor
