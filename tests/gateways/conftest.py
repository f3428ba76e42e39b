"""Gateways in front of this server have packages of their own: `make test-gateways`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

collect_ignore = []
if not all(map(importlib.util.find_spec, ("ray", "smg", "msgspec", "fastapi", "uvloop"))):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a model of one layer, whose tokens are bytes."""
    from tests.serve.tiny import save_model

    folder: Path = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return str(folder)
