"""photon_ext/examples/own_loop.py: somebody else's loop, ours in its place, the same tokens."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.ladder.models import build_model  # noqa: E402
from benchmarks.ladder.stages import LADDERS  # noqa: E402
from photon_ext.examples import own_loop  # noqa: E402

STAGES = {stage.name: stage for stage in LADDERS["hf"]}


@pytest.fixture
def model(device: str) -> Any:
    return build_model("hf", "tiny", torch.float32, torch.device(device), 64)


def stock(*arguments: Any) -> list[int]:
    """The loop that the example replaces: the same static cache, one blocking read per token."""
    return list(STAGES["preallocate"].decode(*arguments))


def test_the_example_is_short() -> None:
    assert len(body_of(Path(own_loop.__file__))) <= 40


@pytest.mark.parametrize("prompt", [[3], [3, 5, 7, 11, 13], list(range(40))])
def test_same_tokens(model: Any, prompt: list[int]) -> None:
    assert own_loop.decode(model, prompt, 24, ()) == stock(model, prompt, 24, ())


def test_same_end_at_a_stop_id(model: Any) -> None:
    free = stock(model, [1, 2, 3], 24, ())
    stop = free[9]
    stopped = own_loop.decode(model, [1, 2, 3], 24, (stop,))
    assert stopped == stock(model, [1, 2, 3], 24, (stop,)) == free[: free.index(stop) + 1]


def test_the_ladder_measures_the_example() -> None:
    """Its pipeline stage is the example, but for how tokens are handed out."""
    example, stage = (body_of(Path(own_loop.__file__)), body_of(STAGES["pipeline"].path))
    assert stage - example == {
        "yield from (event.token for event in pipeline.tick() if event.token is not None)",
    }
    assert example - stage == {
        "tokens = []",
        "tokens += [event.token for event in pipeline.tick() if event.token is not None]",
        "return tokens",
    }


def body_of(path: Path) -> set[str]:
    """The lines of code in a file's function `decode`, without its signature and annotations."""
    (function,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "decode"
    )
    body = ast.Module(function.body[1 if ast.get_docstring(function) else 0 :], [])
    plain = ast.fix_missing_locations(WithoutAnnotations().visit(body))
    return {line.strip() for line in ast.unparse(plain).splitlines() if line.strip()}


class WithoutAnnotations(ast.NodeTransformer):
    """Code as it would stand without types."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.Assign([node.target], node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        self.generic_visit(node)
        return node
