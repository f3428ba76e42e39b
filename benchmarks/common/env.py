"""What a figure depends on besides the code path: versions, machine, commit, and a digest of the
sources.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.digest import source_digest

REPOSITORY = Path(__file__).resolve().parents[2]
# an environment variable that names the commit where the tree is a copy without its history
COMMIT = "PHOTON_COMMIT"


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
        "commit": os.environ.get(COMMIT) or _run("git", "rev-parse", "HEAD", cwd=root),
        "dirty": None if COMMIT in os.environ else _dirty(root),
        "sources": source_digest(root),
    }


def _dirty(root: Path) -> bool | None:
    status = _run("git", "status", "--porcelain", cwd=root)
    return None if status is None else bool(status)


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str, cwd: Path | None = None) -> str | None:
    """Standard output of a command; None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
