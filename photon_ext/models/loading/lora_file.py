"""Adapters from directories of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from photon_ext.errors import ModelError, shortened, shown
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.folding import folded
from photon_ext.models.lora import LoraShape
from photon_ext.models.text.text_files import check_regular, present, read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)\.lora_([AB])\.weight"
)
_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("fan_in_fan_out", "layer_replication", "alora_invocation_tokens"),
)


class _Target(NamedTuple):
    """Where a tensor goes: the layer, the projection, and which of its parts."""

    layer: int
    projection: str
    part: int
    is_a: bool


class _Settings(NamedTuple):
    rank: int
    scaling: float


def read_lora(path: str | Path, shape: LoraShape, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """An adapter as a slot holds it, [words] of `dtype` on the host, page-locked with `pin`; its
    scaling is folded into B, and what it does not adapt is zero.

    Raises ModelError, naming the file, where it is no adapter of PEFT, or of another kind than
    plain LoRA (with or without rslora), is damaged, holds numbers that are not finite, is of
    another shape than the model, of too large a rank, or adapts what is no linear of a layer.
    """
    try:
        directory = Path(path)
    except TypeError as error:
        raise ModelError(f"the adapter's path is {shown(path)}; give a directory") from error
    if not present(directory / CONFIG_FILE):
        raise ModelError(
            f"{directory}: is no directory of a PEFT adapter: it has no {CONFIG_FILE}; give the "
            "one that save_pretrained() wrote"
        )
    settings = _settings(directory / CONFIG_FILE, shape)
    file = directory / WEIGHTS_FILE
    if not present(file):
        raise ModelError(f"{directory}: has no {WEIGHTS_FILE}; save it as safetensors")
    check_regular(file)
    memory = torch.zeros(shape.words, dtype=dtype, pin_memory=pin)
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            _fill(memory, file, handle, _checked(file, handle, settings, shape), settings, shape)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file}: not a whole safetensors file ({shortened(str(error))}); save it again"
        ) from error
    return memory


def _settings(file: Path, shape: LoraShape) -> _Settings:
    values = read_json(file)
    reader = ConfigReader(values, str(file))
    if values.get("peft_type") != "LORA":
        reader.refuse("peft_type", "LORA, the only kind of adapter that is supported")
    for key in _UNSUPPORTED:
        if values.get(key):
            _refuse(file, f"{key} is {shown(values[key])}, which is not supported")
    if values.get("bias", "none") != "none":
        _refuse(file, f"bias is {shown(values['bias'])}, and biases are not adapted")
    rank = reader.positive("r")
    if rank > shape.most_rank:
        raise ModelError(
            f"{file}: r is {rank}, and the engine's slots hold ranks up to {shape.most_rank}; make "
            f"it with lora_rank={rank}"
        )
    root = math.sqrt(rank) if reader.flag("use_rslora") else rank
    return _Settings(rank, reader.number("lora_alpha", 8.0) / root)


def _refuse(file: Path, what: str) -> NoReturn:
    raise ModelError(f"{file}: {what}; train a plain LoRA adapter, or merge this one")


def _checked(file: Path, handle: Any, settings: _Settings, shape: LoraShape) -> dict[str, _Target]:
    """Where each tensor of the file goes."""
    targets = {name: _target(file, name, shape) for name in handle.keys()}  # noqa: SIM118
    if not targets:
        raise ModelError(f"{file}: holds no tensor; save the adapter again")
    for name, target in targets.items():
        projection = shape.projections[target.projection]
        rows, columns = projection.rows[target.part], projection.k
        wanted = [settings.rank, columns] if target.is_a else [rows, settings.rank]
        stored = handle.get_slice(name)
        if stored.get_shape() != wanted:
            raise ModelError(
                f"{file}: {name} has shape {shown(stored.get_shape())}, and with r "
                f"{settings.rank} the model takes {wanted}; it is an adapter of another model"
            )
        if stored.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{file}: {name} is stored as {stored.get_dtype()}; save it in float32, float16 or "
                "bfloat16"
            )
    _check_pairs(file, targets.values())
    return targets


def _target(file: Path, name: str, shape: LoraShape) -> _Target:
    match = _NAME.fullmatch(name)
    for ours, projection in shape.projections.items():
        if match is not None and match[2] in projection.modules:
            layer = int(match[1])
            if layer >= shape.config.layers:
                raise ModelError(
                    f"{file}: {shown(name)} is of layer {layer}, and the model has "
                    f"{shape.config.layers}; it is an adapter of another model"
                )
            part = projection.modules.index(match[2])
            return _Target(layer, ours, part, match[3] == "A")
    known = ", ".join(_modules(shape))
    raise ModelError(
        f"{file}: {shown(name)} adapts no module that is supported; target_modules may be {known}"
    )


def _modules(shape: LoraShape) -> Iterator[str]:
    for projection in shape.projections.values():
        yield from (module.rpartition(".")[2] for module in projection.modules)


def _check_pairs(file: Path, targets: Iterable[_Target]) -> None:
    found = set(targets)
    for target in found:
        if target._replace(is_a=not target.is_a) not in found:
            raise ModelError(
                f"{file}: layer {target.layer} has only one of lora_A and lora_B for a part of "
                f"{target.projection}; save the adapter again"
            )


def _fill(
    memory: torch.Tensor,
    file: Path,
    handle: Any,
    targets: dict[str, _Target],
    settings: _Settings,
    shape: LoraShape,
) -> None:
    """Every tensor into its place."""
    layers = shape.views(memory)
    for name, target in targets.items():
        pair, tensor = layers[target.layer][target.projection], handle.get_tensor(name)
        if target.is_a:
            begin = target.part * shape.rank
            place = pair.a[begin : begin + settings.rank]
        else:
            projection = shape.projections[target.projection]
            rows, module = projection.rows, projection.modules[target.part]
            begin = sum(rows[: target.part])
            place = pair.b[begin : begin + rows[target.part], : settings.rank]
            tensor = folded(shape.config, module, tensor.float() * settings.scaling)
        if not place.copy_(tensor).isfinite().all():
            raise ModelError(
                f"{file}: {name}, scaled, holds NaN, infinity or what is infinite in "
                f"{memory.dtype}; train the adapter anew, or give the engine another dtype"
            )
