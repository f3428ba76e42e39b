"""What a figure depends on besides the code path: versions, machine, commit, and a digest of the sources."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = "PHOTON_COMMIT"  # an environment variable that names the commit where the tree is a copy without its history
GENERATED = frozenset({"photon_ext/_build_info.py"})  # written by setup.py, differs by machine
CPP = frozenset({".cpp", ".cu", ".cuh", ".h"})
CPP_LITERAL_OR_GAP = re.compile(rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?://[^\n]*|/\*.*?\*/|\s)+""", re.DOTALL)


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
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "commit": os.environ.get(COMMIT) or _run("git", "rev-parse", "HEAD", cwd=root),
        "dirty": None if COMMIT in os.environ else _dirty(root),
        "sources": source_digest(root),
    }


def source_digest(root: Path = REPOSITORY) -> str:
    """sha256 over the paths and contents of setup.py, csrc/** and photon_ext/**/*.py, in path order; of C++ without comments and layout."""
    digest = hashlib.sha256()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        content = _code(path)
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _code(path: Path) -> bytes:
    """What a file says to its compiler: in C++ each comment or gap is one space, so that none of them makes a result stale."""
    content = path.read_bytes()
    return CPP_LITERAL_OR_GAP.sub(lambda found: found[1] or b" ", content).strip() if path.suffix in CPP else content


def _sources(root: Path) -> Iterator[Path]:
    yield from root.glob("setup.py")  # compilers' flags
    yield from (path for path in (root / "csrc").rglob("*") if path.is_file() and not path.name.startswith("."))
    package = (root / "photon_ext").rglob("*.py")
    yield from (path for path in package if path.relative_to(root).as_posix() not in GENERATED)


def _dirty(root: Path) -> bool | None:
    status = _run("git", "status", "--porcelain", cwd=root)
    return None if status is None else bool(status)


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str, cwd: Path | None = None) -> str | None:
    """Standard output of a command; None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
