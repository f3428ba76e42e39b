"""DecoderWeights from a GGUF file, dequantized."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from photon_ext.errors import ModelError, shown
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.loading.gguf_config import ROPE_FACTORS
from photon_ext.models.loading.gguf_file import GgufFile
from photon_ext.models.weights import DecoderWeights, empty_weights, weight_slots

MOST_THREADS = 8  # each has a tensor in float32


def unpermute_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of a Llama q or k projection, [heads * D, H].

    llama.cpp rotates neighbouring pairs and stores row pairs interleaved; our rotation, like
    Hugging Face's, pairs row i with row i + D/2.
    """
    n, k = rows.shape
    return rows.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)


def load_gguf_weights(
    file: GgufFile,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Dequantizes every parameter of `config` from `file`, converted to `dtype` on `device`.

    Raises ModelError, naming the file and the tensor, where one is missing, of another shape, or
    would be ignored.
    """
    slots = dict(weight_slots(empty_weights(config, dtype, "meta")))
    table = get_tensor_name_map(MODEL_ARCH[config.family.name], config.layers)
    names = {name: table.get_name(name, (".weight",)) or name for name in slots}
    _check_tensors(file, {names[name]: slot.shape for name, slot in slots.items()})
    weights = empty_weights(config, dtype, device)

    def fill(name: str, slot: torch.Tensor) -> None:
        tensor = file.tensor(names[name])
        if config.family is Family.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = unpermute_heads(
                tensor, config.q_heads if "q_proj" in name else config.kv_heads
            )
        slot.copy_(tensor)

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        for filled in [threads.submit(fill, *named) for named in weight_slots(weights)]:
            filled.result()
    return weights


def _check_tensors(file: GgufFile, expected: dict[str, torch.Size]) -> None:
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
        if file.shape(name) != tuple(shape):
            raise ModelError(
                f"{file.path}: {name} has shape {list(file.shape(name))}, its metadata asks for "
                f"{list(shape)}"
            )
