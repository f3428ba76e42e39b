"""The command line, run in this process: what it prints where, and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from photon_ext.cli import main
from tests.models.tiny import VOCAB, saved_tiny_model

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "ttft_ms",
    "tokens_per_s",
    "steps",
    "zombie_rows",
    "depth",
    "device",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer of words: "w3" is token 3."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    saved_tiny_model("llama-plain", folder)
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("depth", [1, 2])
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str], model: str, depth: int) -> None:
    common = ("--model", model, "--device", "cpu", "--max-new-tokens", "7", "--depth", str(depth), "--json")
    code, out, err = run(capsys, "generate", "w5 w6 w7", *common)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == KEYS
    assert (result["depth"], result["device"], result["prompt_tokens"]) == (depth, "cpu", 3)
    assert result["finish_reason"] in ("length", "stop")
    shown = result["token_ids"][:-1] if result["finish_reason"] == "stop" else result["token_ids"]
    assert result["text"] == " ".join(f"w{token}" for token in shown)
    assert result["steps"] >= len(result["token_ids"])
    assert result["ttft_ms"] > 0


def test_text_goes_to_stdout_and_the_summary_to_stderr(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("generate", "w5 w6 w7", "--model", model, "--device", "cpu", "--max-new-tokens", "7")
    text = json.loads(run(capsys, *common, "--json")[1])["text"]
    code, out, err = run(capsys, *common)
    assert (code, out) == (0, text + "\n")
    assert err.count("\n") == 1
    assert all(part in err for part in ("tokens/s", "step gap", "depth 2", "cpu"))


def test_a_seed_repeats_a_sampled_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("generate", "w5", "--model", model, "--device", "cpu", "--temperature", "1.5", "--json", "--seed")
    answers = [json.loads(run(capsys, *common, seed)[1])["token_ids"] for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--depth", "3"), "depth is 3"),
        (("--depth", "two"), "--depth: invalid int value: 'two'"),
        (("--device", "tpu"), "'tpu'"),
        (("--dtype", "int8"), "dtype is 'int8'"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--max-len", "2"), "the prompt has 3 tokens and the context holds 2"),
        (("--max-len", "257"), "made for 256 positions"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--seed", "-1"), "seed is -1"),
        (("--colour", "blue"), "--colour"),
    ],
)
def test_mistakes_are_told_in_one_line_with_exit_code_two(
    capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, "generate", "w5 w6 w7", "--model", model, "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("photon-ext")
    assert message in err


def test_an_empty_prompt_is_a_mistake_too(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, _, err = run(capsys, "generate", "", "--model", model, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert "the prompt is empty" in err


def test_no_command_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "--help" in err


def test_info_names_versions_devices_kernels_and_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    for part in ("photon_ext ", "torch ", "build:", "devices:", "kernel threads", "kernels:", "cuda:", "missing:"):
        assert part in out
