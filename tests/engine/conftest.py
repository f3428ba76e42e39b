"""Where a package that these tests need is missing, they are left out; the session's header
names it.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_PACKAGES = ("transformers", "safetensors", "tokenizers", "jinja2", "hypothesis")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(autouse=True, scope="package")
def _a_vocabulary_is_made_once() -> Iterator[None]:
    """For all engines of a tokenizer: it takes half a second."""
    from photon_ext.models.text import grammar_vocabulary as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "grammar_vocabulary", cache(module.grammar_vocabulary))
        yield


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
