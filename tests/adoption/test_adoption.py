"""README, "Use it from your engine": somebody else's loop, ours in its place, the same tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.ladder.models import build_model  # noqa: E402
from benchmarks.ladder.stages import LADDERS  # noqa: E402

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCK = re.search(r"<!-- adoption:.*?-->\n```python\n(.*?)```", README, re.DOTALL)
STAGES = {stage.name: stage for stage in LADDERS["hf"]}


@pytest.fixture
def model(device: str) -> Any:
    return build_model("hf", "tiny", torch.float32, torch.device(device), 64)


@pytest.fixture
def block() -> str:
    assert BLOCK is not None, (
        "README.md has no ```python block after a comment <!-- adoption: ... -->"
    )
    return BLOCK.group(1)


@pytest.fixture
def decode(block: str) -> Callable[..., list[int]]:
    """``decode`` as README defines it."""
    namespace: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace["decode"]


def stock(*arguments: Any) -> list[int]:
    """The loop that README's replaces: the same static cache, and one blocking read per token."""
    return list(STAGES["preallocate"].decode(*arguments))


def statements(source: str) -> list[str]:
    """Lines of code without comments, docstring and layout."""
    module = ast.parse(source)
    if ast.get_docstring(module) is not None:
        del module.body[0]
    return [line.strip() for line in ast.unparse(module).splitlines() if line.strip()]


def test_the_example_is_short(block: str) -> None:
    assert len(statements(block)) <= 40


@pytest.mark.parametrize("prompt", [[3], [3, 5, 7, 11, 13], list(range(40))])
def test_same_tokens(model: Any, decode: Callable[..., list[int]], prompt: list[int]) -> None:
    assert decode(model, prompt, 24, ()) == stock(model, prompt, 24, ())


def test_same_end_at_a_stop_id(model: Any, decode: Callable[..., list[int]]) -> None:
    free = stock(model, [1, 2, 3], 24, ())
    stop = free[9]
    stopped = decode(model, [1, 2, 3], 24, (stop,))
    assert stopped == stock(model, [1, 2, 3], 24, (stop,)) == free[: free.index(stop) + 1]


def test_the_ladder_measures_the_example(block: str) -> None:
    """Its pipeline stage is the example, but for how tokens are handed out."""
    stage = set(statements(STAGES["pipeline"].path.read_text()))
    example = set(statements(block))
    assert stage - example == {
        "@torch.inference_mode()",
        "yield from (event.token for event in pipeline.tick() if event.token is not None)",
    }
    assert example - stage == {
        "with torch.inference_mode():",
        "tokens = []",
        "tokens += [event.token for event in pipeline.tick() if event.token is not None]",
        "return tokens",
    }
