"""Each example runs as it is called, on the CPU, and does what it says."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import photon_ext

if TYPE_CHECKING:
    from photon_ext.models.loading.loader import LoadedModel

EXAMPLES = Path(photon_ext.__file__).parent / "examples"


def run(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    import_module(f"photon_ext.examples.{name}").main(arguments)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that speaks in words, "w3" being token 3, with a chat template."""
    for package in ("transformers", "safetensors", "tokenizers", "jinja2"):
        pytest.importorskip(package)
    from tests.cli.command import save_with_template

    folder: Path = tmp_path_factory.mktemp("chat")
    save_with_template(folder)
    return str(folder)


def test_every_example_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    names -= {"ray_serve"}  # in tests/gateways
    assert names == {
        *("chat", "constraints", "json_answer", "multi_row", "ops", "own_loop", "paged_scheduler")
    }


def test_chat_gives_two_answers(capsys: pytest.CaptureFixture[str], model: str) -> None:
    questions = ("--first", "w5 w6", "--second", "w7")
    lines = run(capsys, "chat", "--model", model, "--max-new-tokens", "5", *questions)
    assert [len(line.split()) for line in lines] == [5, 5]


@pytest.mark.parametrize("choices", [["w31 w40", "w63"], ["w5 w5 w7", "w5 w6"]])
def test_the_answer_is_one_of_the_choices(
    capsys: pytest.CaptureFixture[str], model: str, choices: list[str]
) -> None:
    given = [part for choice in choices for part in ("--choice", choice)]
    (answer,) = run(capsys, "constraints", "--model", model, "--prompt", "w5 w6", *given)
    assert answer in choices


def test_an_answer_is_json_of_a_schema(
    capsys: pytest.CaptureFixture[str], smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    models = {"smollm2": smollm2}
    monkeypatch.setattr("photon_ext.engine.engine.load_model", lambda name, *rest: models[name])
    (line,) = run(capsys, "json_answer", "--device", "cpu", "--prompt", "Ada Lovelace, 1815")
    assert re.fullmatch(r"\S.*, born in [12]\d{3}", line)


def test_several_rows_give_the_tokens_of_each_alone(capsys: pytest.CaptureFixture[str]) -> None:
    *tokens, verdict = run(capsys, "multi_row", "--new-tokens", "9")
    assert [len(line.split()) for line in tokens] == [9, 9, 9, 9]
    assert len(set(tokens)) == 4
    assert verdict == "each alone gives the same: True"


@pytest.mark.parametrize(("pages", "preempts"), [("7", True), ("12", True), ("40", False)])
def test_a_paged_scheduler_gives_the_tokens_of_each_alone(
    capsys: pytest.CaptureFixture[str], pages: str, preempts: bool
) -> None:
    *tokens, counts, verdict = run(capsys, "paged_scheduler", "--pages", pages)
    assert [len(line.split()) for line in tokens] == 4 * [16]
    found = re.fullmatch(r"preempted: (\d+), tokens in shared pages: (\d+)", counts)
    assert found is not None
    assert (int(found[1]) > 0, int(found[2]) > 0) == (preempts, preempts)
    assert verdict == "each alone gives the same: True"


def test_the_loop_to_copy_is_short() -> None:
    pytest.importorskip("transformers")
    from photon_ext.examples import own_loop

    assert len(inspect.getsource(own_loop.decode).splitlines()) <= 32


def test_a_loop_of_your_own_gives_the_models_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tokens, verdict = run(capsys, "own_loop", "--new-tokens", "8")
    assert len(tokens.split(",")) == 8
    assert verdict == "the model's own generate gives the same: True"


def test_single_ops_do_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ops") == [
        "carried over: 41 8 40",
        "one key gets all of the attention: True",
        "a weight of four bits: True",
    ]
