"""Models of the Hugging Face Hub by their ids: what lies in its cache, else what is downloaded now,
by huggingface_hub, which shows its progress on stderr.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from photon_ext.errors import ModelError, describe, shortened, shown
from photon_ext.models.loading.hub_cache import cache_folder, cached_snapshot, missing_files
from photon_ext.models.loading.shards import weight_files

_SMALL_FILES = ["*.json", "*.jinja"]
_FOLDERS = ["*/*"]  # other formats of the same weights
# As huggingface_hub reads them: the first that is not empty counts.
_OFFLINE = "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"
_YES = "1", "ON", "YES", "TRUE"


def hub_snapshot(model: str, weights: bool = True) -> Path:
    """The directory of a model; without `weights`, no more of it than its small files.

    Raises ModelError: it is neither there nor to be had; the message says what to do.
    """
    try:
        return cached_snapshot(model, weights)
    except ModelError as error:
        variable = next((name for name in _OFFLINE if os.environ.get(name)), None)
        if variable and os.environ[variable].upper() in _YES:
            raise ModelError(f"{error}; nothing is downloaded while {variable} is set") from error
    with _errors_in_words(model):
        return _download(model, weights)


def _download(model: str, weights: bool) -> Path:
    """The weights last: a directory that has them has all, whenever a download was broken off."""
    from huggingface_hub import snapshot_download

    cache = cache_folder()
    snapshot = Path(
        snapshot_download(
            model, cache_dir=cache, allow_patterns=_SMALL_FILES, ignore_patterns=_FOLDERS
        )
    )
    if weights and not missing_files(snapshot, weights=False):
        # By name, of the same commit: some models hold their weights twice, the other ones besides.
        snapshot_download(
            model, cache_dir=cache, revision=snapshot.name, allow_patterns=weight_files(snapshot)
        )
    if missing := missing_files(snapshot, weights):
        raise ModelError(
            f"model {shown(model)}: on the Hub it has no {shortened(' and no '.join(missing))}; "
            f"for a .gguf file of it, `hf download {model} FILE.gguf`, then give that file's path"
        )
    return snapshot


@contextmanager
def _errors_in_words(model: str) -> Iterator[None]:
    """Around a download: a ModelError that says what to do, whatever huggingface_hub raises."""
    told = f"model {shown(model)}: no such file or directory"
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(
            f"{told}; to get it from the Hugging Face Hub: pip install huggingface_hub"
        ) from error
    except Exception as error:  # also its HTTP client's own, which differ from version to version
        raise ModelError(f"{told}, and {_reason(model, error)}") from error


def _reason(model: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            "its owner on the Hub asks who downloads it; ask for access on its page there, then "
            "run `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "no such model on the Hub, or a private one; check the name, or run `hf auth login`"
    return (
        f"the Hugging Face Hub did not give it ({describe(error)}); try again, or "
        f"run `hf download {model}` where the Hub is reached and give the path of that directory"
    )
