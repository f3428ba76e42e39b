"""Where a package that these tests need is missing, they are left out; the session's header
names it.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from photon_ext.engine import compiled_grammar, deep_thread, grammar_compiler
from photon_ext.sampling.byte_automaton import AutomatonLimits

_PACKAGES = ("transformers", "safetensors", "tokenizers", "jinja2", "hypothesis")
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(autouse=True, scope="package")
def _forms_have_time() -> Iterator[None]:
    """On a busy machine one takes longer than an engine waits, and then the host keeps the form, or
    it is refused, and what compiles it is in the way of those that come next.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_grammar, "_DEADLINE_S", 60.0)
        patch.setattr(deep_thread, "BUSY_S", 60.0)
        patient = partial(AutomatonLimits, seconds=60.0)
        patch.setattr(grammar_compiler, "AutomatonLimits", patient)
        yield


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
