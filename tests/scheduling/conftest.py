"""What tests of scheduling share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For tests that plant an interrupt: a garbage collection may call functions in Python, as of hypothesis, and lose it there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
