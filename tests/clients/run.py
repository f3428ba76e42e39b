"""Unmodified clients against `photon-ext serve`, each in an environment of its own.

    python -m tests.clients.run [--home build/clients] [NAME ...]

An environment is made once, of the versions in constraints/NAME.txt, and anew where these have
changed. All servers run from this Python's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.clients.chat_model import save_chat_model

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
# One event loop for all tests: langchain keeps connections from one to the next.
_LOOPS = [f"-oasyncio_default_{each}_loop_scope=session" for each in ("test", "fixture")]


class Environment(NamedTuple):
    """
    Attributes:
        packages: what is installed, in the versions of a constraints file.
        tests: test files, by what stands behind "test_".
        command: the client is a command, which a test runs that is itself run by our Python.
        options: of pytest.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    command: bool = False
    options: tuple[str, ...] = ()


ENVIRONMENTS = {
    "openai-1": Environment(("openai", "pytest"), ("openai",)),
    "newest": Environment(
        ("openai", "anthropic", "langchain-openai", "langchain-tests", "pytest"),
        ("openai", "anthropic", "langchain"),
        options=("-oasyncio_mode=auto", *_LOOPS),
    ),
    "instructor": Environment(("instructor", "pytest"), ("instructor",)),
    "lm-eval": Environment(("lm-eval[api]", "transformers"), ("lm_eval",), command=True),
    "guidellm": Environment(("guidellm", "torch==2.13.0"), ("guidellm",), command=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--home", type=Path, default=ROOT / "build/clients")
    arguments = parser.parse_args()
    home = arguments.home.resolve()
    model = home / "model"
    save_chat_model(model)
    failed = []
    for name in arguments.names or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        bin_ = _made(home / name, name, environment) / "bin"
        if _tested(name, environment, bin_, model):
            failed.append(name)
    print(f"clients that failed: {', '.join(failed)}" if failed else "all clients passed")
    return bool(failed)


def _made(folder: Path, name: str, environment: Environment) -> Path:
    """The folder, with a virtual environment that has these packages."""
    constraints = HERE / "constraints" / f"{name}.txt"
    wanted = [sys.version, *environment.packages, constraints.read_text()]
    stamp, digest = folder / "made-of", hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    print(f"clients: installing {', '.join(environment.packages)} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    subprocess.run(
        [*pip, "-q", "--no-compile", "-c", str(constraints), *environment.packages], check=True
    )
    stamp.write_text(digest)
    return folder


def _tested(name: str, environment: Environment, bin_: Path, model: Path) -> int:
    """pytest's exit code."""
    python = sys.executable if environment.command else str(bin_ / "python")
    print(f"clients: {name}", flush=True)
    line = [python, "-m", "pytest", "-q", "-c", str(HERE / "pytest.ini")]
    line += ["--confcutdir", str(HERE), *environment.options]
    line += [str(HERE / f"test_{test}.py") for test in environment.tests]
    own: Mapping[str, str] = {
        "PHOTON_PYTHON": sys.executable,
        "PHOTON_CHAT_MODEL": str(model),
        "PHOTON_CLIENT_BIN": str(bin_),
    }
    return subprocess.run(line, cwd=ROOT, env={**os.environ, **own}).returncode


if __name__ == "__main__":
    sys.exit(main())
