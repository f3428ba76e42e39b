"""The models of the command line's tests. Where a package that they need is missing, they are left
out.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

_PACKAGES = ("transformers", "safetensors", "tokenizers", "jinja2")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer of words: "w3" is token 3."""
    from tests.cli.command import save_with_words

    folder: Path = tmp_path_factory.mktemp("tiny")
    save_with_words(folder, "w")
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template."""
    from tests.cli.command import save_with_template

    folder: Path = tmp_path_factory.mktemp("chat")
    save_with_template(folder)
    return str(folder)


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], model: str) -> Callable[..., tuple[int, str, str]]:
    """Runs `photon-ext generate` with the tiny model: exit code, stdout, stderr."""
    from tests.cli.command import run

    return partial(run, capsys, "generate", "--model", model, "--device", "cpu")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C works here also where a shell runs the tests in the background and so ignores it:
    processes that are started here inherit the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
