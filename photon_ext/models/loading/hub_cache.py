"""Models in the cache of the Hugging Face Hub, read without huggingface_hub.

The layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from photon_ext.errors import ModelError, shortened, shown
from photon_ext.models.loading.shards import weight_files
from photon_ext.models.text.text_files import present, read_text

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(model: str) -> bool:
    """Whether it may be the id of a model on the Hub, such as Qwen/Qwen3-0.6B. A path may be, too,
    but for that of a .gguf file.
    """
    return _ID.fullmatch(model) is not None and not model.endswith(".gguf")


def cached_snapshot(model: str, weights: bool = True) -> Path:
    """The directory of a model by its id on the Hub: of its branch "main", where that is there;
    without `weights`, one that has its config.json is enough.

    Raises ModelError: it is not in the cache, or not whole; the message says how to get it.
    """
    cache = cache_folder()
    fault = f"no such file or directory, and the Hub cache {cache} does not have it"
    for snapshot in _snapshots(cache / f"models--{model.replace('/', '--')}"):
        if any(snapshot.glob("*.gguf")):
            return snapshot
        missing = missing_files(snapshot, weights)
        if not missing:
            return snapshot
        fault = f"{snapshot} has no {shortened(' and no '.join(missing))}"
    raise ModelError(
        f"model {shown(model)}: {fault}; get it with `hf download {model}`, or give the path of a "
        "Hugging Face directory or a .gguf file"
    )


def missing_files(snapshot: Path, weights: bool = True) -> list[str]:
    """What a Hugging Face directory needs and this one lacks, as a download that was broken off
    leaves it.
    """
    wanted = ["config.json", *(weight_files(snapshot) if weights else [])]
    return [name for name in wanted if not present(snapshot / name)]


def _snapshots(folder: Path) -> Iterator[Path]:
    """That of the branch "main"; without one, the one that there is."""
    main = folder / "refs" / "main"
    if present(main):
        commit = read_text(main).strip()
        if _COMMIT.fullmatch(commit) and present(folder / "snapshots" / commit):
            yield folder / "snapshots" / commit
    elif len(found := sorted((folder / "snapshots").glob("*"))) == 1:
        yield found[0]


def cache_folder() -> Path:
    """Where huggingface_hub keeps models, by the same variables of the environment."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(home).expanduser() / "hub"
