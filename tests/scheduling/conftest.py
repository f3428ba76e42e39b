"""Without hypothesis these tests are left out; the session's header names it."""

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore = []
if importlib.util.find_spec("hypothesis") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


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
