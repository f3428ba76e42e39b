"""Where a package that these tests need is missing, they are left out; the session's header
names it.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_PACKAGES = ("transformers", "safetensors", "tokenizers", "jinja2", "hypothesis")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> Iterator[None]:
    """For the references in transformers: tiny models gain nothing from more, and spinning
    threads slow down a shared machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For tests that plant an interrupt: a garbage collection may call functions in Python, as
    of hypothesis, and lose it there.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
