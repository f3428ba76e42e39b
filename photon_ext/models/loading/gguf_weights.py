"""DecoderWeights from a GGUF file, as stored or in a dtype to multiply in."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.gguf_config import ROPE_FACTORS
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.loading.placing import place
from photon_ext.models.loading.progress import counted
from photon_ext.models.quantization import ModuleFormats, StoredFormat
from photon_ext.models.weights import (
    DecoderWeights,
    empty_weights,
    other_slots,
    weight_modules,
    weight_slots,
)
from photon_ext.weight import Weight

MOST_THREADS = 8  # each has a tensor in float32


def unpermute_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of a Llama q or k projection, [heads * D, ...].

    llama.cpp rotates neighbouring pairs and stores row pairs interleaved; our rotation, like
    Hugging Face's, pairs row i with row i + D/2.
    """
    n, k = rows.shape
    return rows.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)


def stored_formats(file: GgufFile, config: ModelConfig) -> ModuleFormats | None:
    """The formats of the modules of `config` whose blocks in `file` kernels read as they are; None:
    there is none.
    """
    names = _names(config)
    plain = empty_weights(replace(config, quantization=None), torch.uint8, "meta")
    formats = {}
    for module, _ in weight_modules(plain):
        name = names[f"{module}.weight"]
        form = file.format(name) if name in file.tensor_names else None
        if form is not None:
            formats[module] = StoredFormat(form)
    return ModuleFormats(formats) if formats else None


def load_gguf_weights(
    file: GgufFile,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Reads every parameter of `config` from `file`: in `dtype` on `device`, or as
    `config.quantization` has it.

    Raises ModelError, naming the file and the tensor, where one is missing, of another shape, or
    would be ignored.
    """
    names = _names(config)
    slots = empty_weights(config, dtype, "meta")
    shapes = {names[name]: tuple(slot.shape) for name, slot in other_slots(slots)}
    shapes |= {names[f"{name}.weight"]: (slot.n, slot.k) for name, slot in weight_modules(slots)}
    _check_tensors(file, shapes)
    weights = empty_weights(config, dtype, device)

    def fill(module: str, slot: Weight) -> None:
        name = names[f"{module}.weight"]
        weight = file.weight(name)
        heads = {"q_proj": config.q_heads, "k_proj": config.kv_heads}.get(module.split(".")[-1])
        if config.family is Family.LLAMA and heads is not None:
            weight = Weight(unpermute_heads(weight.data, heads), weight.format)
        place(slot, weight, f"{file.path}: {name}")

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        modules = [threads.submit(fill, *named) for named in weight_modules(weights)]
        try:
            for filled in counted(modules, f"loading {config.quantization or 'weights'}"):
                filled.result()
        finally:  # one that fails need not wait for the others
            threads.shutdown(cancel_futures=True)
    for name, slot in other_slots(weights):
        slot.copy_(file.tensor(names[name]))
    return weights


def _names(config: ModelConfig) -> dict[str, str]:
    """The names of a file's tensors by those of Hugging Face."""
    table = get_tensor_name_map(MODEL_ARCH[config.family.name], config.layers)
    slots = weight_slots(empty_weights(replace(config, quantization=None), torch.uint8, "meta"))
    return {name: table.get_name(name, (".weight",)) or name for name, _ in slots}


def _check_tensors(file: GgufFile, expected: dict[str, tuple[int, ...]]) -> None:
    """Before anything is allocated: a damaged size would ask for all the memory there is."""
    missing = sorted(expected.keys() - file.tensor_names)
    extra = sorted(file.tensor_names - expected.keys() - {ROPE_FACTORS})
    if missing:
        raise ModelError(
            f"{file.path}: {len(missing)} of {len(expected)} tensors are missing, first "
            f"{missing[0]!r}; download it again"
        )
    if extra:
        raise ModelError(
            f"{file.path}: {len(extra)} tensors would be ignored, first {shown(extra[0])}; this "
            "variant is not supported"
        )
    for name, shape in expected.items():
        if file.shape(name) != shape:
            raise ModelError(
                f"{file.path}: {name} has shape {list(file.shape(name))}, its metadata asks for "
                f"{list(shape)}"
            )
