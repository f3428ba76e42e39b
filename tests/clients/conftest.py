"""Servers for clients that know nothing of photon_ext. `make test-clients` runs these tests, in
environments of their own: see run.py. Elsewhere they are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.serve.processes import Server

PYTHON, MODEL = os.environ.get("PHOTON_PYTHON"), os.environ.get("PHOTON_CHAT_MODEL", "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]
KEY = "key"


def _address(app: str | None) -> Iterator[str]:
    assert PYTHON is not None
    own = ("--served-model-name", "tiny", "--served-model-name", "alias", "--api-key", KEY)
    with Server(MODEL, *own, app=app, python=PYTHON) as server:
        yield f"http://127.0.0.1:{server.port}"
        print(*server.log, sep="\n")  # shown where a test has failed


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of a server whose model is tiny and random."""
    yield from _address(None)


@pytest.fixture(scope="session")
def scripted_address() -> Iterator[str]:
    """Of one whose model answers by scripted.py."""
    yield from _address("tests.clients.scripted:make_app")
