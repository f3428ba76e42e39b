"""A tokenizer of bytes in a directory of its own, and the app over the stub engine. Where a package
that these tests need is missing, they are left out; the session's header names it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

_PACKAGES = ("fastapi", "uvicorn", "msgspec", "httpx2", "openai")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
else:
    from tests.serve.http.server import on_a_port, says
    from tests.serve.http.stub import StubClient
    from tests.serve.http.words import TEMPLATE, special_backend


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 256 bytes and some special tokens, with a chat template."""
    folder = tmp_path_factory.mktemp("stub-model")
    (folder / "tokenizer.json").write_text(special_backend().to_str())
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine() -> StubClient:
    return StubClient(says("Hello"))


@pytest.fixture(scope="module")
def address(engine: StubClient, model_dir: Path) -> Iterator[str]:
    """Of a server with this engine, for unmodified clients; its key is "key"."""
    with on_a_port(engine, model_dir, api_keys=("key",)) as address:
        yield address
