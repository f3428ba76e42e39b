"""A tiny random model that every process of a server can load in no time, and a server of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGES = ("safetensors", "tokenizers", "msgspec", "uvicorn", "httptools", "uvloop", "llguidance")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a model of one layer, whose tokens are bytes."""
    from tests.serve.tiny import save_model

    folder: Path = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return str(folder)


@pytest.fixture(scope="package")
def server(model: str) -> Iterator[object]:
    """A server of two HTTP processes that the tests of this folder share, and leave as they found
    it.
    """
    from tests.serve.processes import Server

    with Server(model, "--http-workers", "2", "--max-waiting", "40") as started:
        yield started
        print(*started.log, sep="\n")  # shown where a test has failed
