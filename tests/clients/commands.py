"""Clients that are commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clients.conftest import KEY


def run_client(name: str, *arguments: str, cwd: Path) -> str:
    """Runs a command of the environment that is tried; returns what it has written, and fails where
    it has failed.
    """
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), "OPENAI_API_KEY": KEY}
    ended = subprocess.run(
        [Path(os.environ["PHOTON_CLIENT_BIN"]) / name, *arguments],
        cwd=cwd,
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
