"""What a figure depends on besides the code path: versions, machine, commit, and source trees."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = "PHOTON_COMMIT"  # names the commit where the tree is a copy without its history
SOURCES = ("csrc", "photon_ext")  # the folders that results depend on


def environment(root: Path = REPOSITORY) -> dict[str, Any]:
    """Everything that identifies a run, as JSON values; what cannot be found out is None."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "driver": _run(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        ),
        "commit": os.environ.get(COMMIT) or _git(root, "rev-parse", "HEAD"),
        "dirty": None if COMMIT in os.environ else _dirty(root),
        "trees": None if COMMIT in os.environ else source_trees("HEAD", root),
    }


def source_trees(commit: str, root: Path = REPOSITORY) -> dict[str, str] | None:
    """git's own hash of each of SOURCES at a commit; None where git or the commit is missing."""
    found = _git(root, "rev-parse", *(f"{commit}:{folder}" for folder in SOURCES))
    return None if found is None else dict(zip(SOURCES, found.split(), strict=True))


def _dirty(root: Path) -> bool | None:
    """Whether SOURCES differ from the commit."""
    status = _git(root, "status", "--porcelain", "--", *SOURCES)
    return None if status is None else bool(status)


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    return _run("git", "-C", str(root), *arguments)


def _run(*command: str) -> str | None:
    """Standard output of a command; None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
