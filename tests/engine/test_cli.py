"""The command line: what it prints where, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import photon_ext
from photon_ext import info
from photon_ext.cli import main
from tests.models.tiny import VOCAB, saved_tiny_model

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "ttft_ms",
    "tokens_per_s",
    "step_gap_us",
    "steps",
    "zombie_rows",
    "depth",
    "device",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer of words: "w3" is token 3."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_with_words(folder, "w")
    return str(folder)


def save_with_words(folder: Path, letter: str) -> None:
    saved_tiny_model("llama-plain", folder)
    backend = Backend(
        models.WordLevel({f"{letter}{i}": i for i in range(VOCAB)}, unk_token=f"{letter}0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.save(str(folder / "tokenizer.json"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("depth", [1, 2])
def test_json_is_one_object_and_nothing_else(
    capsys: pytest.CaptureFixture[str], model: str, depth: int
) -> None:
    common = (
        "--model",
        model,
        "--device",
        "cpu",
        "--max-new-tokens",
        "7",
        "--depth",
        str(depth),
        "--json",
    )
    code, out, err = run(capsys, "generate", "w5 w6 w7", *common)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == KEYS
    assert (result["depth"], result["device"], result["prompt_tokens"]) == (depth, "cpu", 3)
    assert result["finish_reason"] in ("length", "stop")
    shown = result["token_ids"][:-1] if result["finish_reason"] == "stop" else result["token_ids"]
    assert result["text"] == " ".join(f"w{token}" for token in shown)
    assert result["steps"] >= len(result["token_ids"])
    assert result["ttft_ms"] == round(result["ttft_ms"], 3) > 0
    assert result["step_gap_us"] is None or result["step_gap_us"] == round(result["step_gap_us"], 2)


def test_text_goes_to_stdout_and_the_summary_to_stderr(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    common = ("generate", "w5 w6 w7", "--model", model, "--device", "cpu", "--max-new-tokens", "7")
    text = json.loads(run(capsys, *common, "--json")[1])["text"]
    code, out, err = run(capsys, *common)
    assert (code, out) == (0, text + "\n")
    assert err.count("\n") == 1
    assert all(part in err for part in ("tokens/s", "step gap", "depth 2", "cpu"))


def test_fast_kernels_that_do_not_run_here_are_said_so_and_change_nothing(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    arguments = (
        "generate",
        "w5 w6",
        "--model",
        model,
        "--device",
        "cpu",
        "--raw",
        "--max-new-tokens",
        "4",
        "--json",
    )
    _, plain, errors = run(capsys, *arguments)
    assert errors == ""
    code, out, errors = run(capsys, *arguments, "--hopper-kernels")
    assert (code, json.loads(out)["token_ids"]) == (0, json.loads(plain)["token_ids"])
    assert (
        errors
        == "photon-ext generate: --hopper-kernels changes nothing on cpu; photon-ext info says "
        "which kernels run\n"
    )


def test_a_seed_repeats_a_sampled_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = (
        "generate",
        "w5",
        "--model",
        model,
        "--device",
        "cpu",
        "--temperature",
        "1.5",
        "--json",
        "--seed",
    )
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
    code, out, err = run(
        capsys, "generate", "w5 w6 w7", "--model", model, "--device", "cpu", *arguments
    )
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
    for part in (
        "photon_ext ",
        "torch ",
        "build:",
        "devices:",
        "kernel threads",
        "kernels:",
        "cuda:",
        "missing:",
    ):
        assert part in out


def test_info_without_cuda_calls_it_none_and_optional(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(info.BUILD_INFO, "cuda", None)
    monkeypatch.setitem(info.BUILD_INFO, "cuda_archs", [])
    monkeypatch.setattr(info, "_C", SimpleNamespace(cuda_compiled=False))
    code, out, _ = run(capsys, "info")
    lines = [line.strip() for line in out.splitlines()]
    assert code == 0
    assert "cuda: none" in lines
    assert "cuda_archs: none" in lines
    missing = lines[lines.index("missing:") :]
    assert any(line.startswith("for a GPU: the CUDA kernels") for line in missing)
    assert all(
        line.startswith("for a GPU: ") for line in missing if "CUDA" in line or "GPU" in line
    )


def test_info_advises_no_toolkit_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(info, "_C", SimpleNamespace(cuda_compiled=False))
    monkeypatch.setattr(
        shutil, "which", lambda name: name if name.startswith(str(tmp_path)) else None
    )
    again = "PHOTON_CUDA=1 python setup.py build_ext --inplace\n"
    assert (
        f"for a GPU: the CUDA kernels; install the CUDA toolkit (nvcc), then {again}"
        in run(capsys, "info")[1]
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert (
        f"for a GPU: the CUDA kernels; {tmp_path}/bin/nvcc is there, so build again: {again}"
        in run(capsys, "info")[1]
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"photon-ext {photon_ext.__version__}\n", "")


def test_a_prompt_that_is_no_text_is_a_mistake(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    code, out, err = run(capsys, "generate", "w5 \udcff", "--model", model, "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the prompt holds a surrogate, U+DCFF" in err


def test_a_model_without_its_tokenizer_says_where_to_put_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    code, _, err = run(capsys, "generate", "w5", "--model", str(tmp_path), "--device", "cpu")
    assert code == 2
    assert (
        err
        == f"photon-ext generate: {tmp_path} has no tokenizer.json; copy it there (save_pretrained "
        "of the tokenizer)\n"
    )


# --- in a process of its own: what a terminal, a pipe or a script sees ----------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "photon_ext", "generate", *arguments, "--device", "cpu"]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | more


def test_the_summary_has_a_line_of_its_own_where_both_streams_are_one_pipe(model: str) -> None:
    line = command("w5 w6", "--model", model, "--max-new-tokens", "5")
    done = subprocess.run(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    text, summary = done.stdout.splitlines()
    assert done.returncode == 0
    assert text.startswith("w")
    assert summary.startswith("[5 tokens (")


def test_the_meters_last_line_is_one_of_its_own_where_both_streams_are_one_pipe(model: str) -> None:
    line = command("w5 w6", "--model", model, "--max-new-tokens", "5", "--meter")
    done = subprocess.run(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert [text[:8] for text in done.stdout.splitlines()[-2:]] == ["[meter] ", "[5 token"]


def test_an_output_that_lacks_a_character_shows_a_question_mark(tmp_path: Path) -> None:
    save_with_words(tmp_path, "\u00e4")
    line = command("\u00e45 \u00e46", "--model", str(tmp_path), "--max-new-tokens", "5", "--raw")
    done = subprocess.run(
        line,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?")


@pytest.mark.parametrize("when", ["while it is imported", "while it runs"])
def test_ctrl_c_says_so_in_one_line(model: str, when: str) -> None:
    """The signal comes from within, at a known place."""
    program = f"""
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "photon_ext.engine" and {when == "while it is imported"}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from photon_ext import cli
def stream(request):
    next(request.iter())
    os.kill(os.getpid(), signal.SIGINT)
cli._stream = stream
arguments = ["generate", "w5", "--model", {model!r}, "--device", "cpu"]
sys.exit(cli.main([*arguments, "--max-new-tokens", "200"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def shell(line: list[str], streams: str) -> subprocess.CompletedProcess[str]:
    """A command with its streams as a shell sends them somewhere."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {streams}', "bash", *line],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("what", ["generate", "generate --json", "info", "--help"])
def test_a_full_disk_is_told_in_one_line(model: str, what: str) -> None:
    words = what.split()
    options = (
        ["w5 w6", "--model", model, "--device", "cpu", "--max-new-tokens", "5"]
        if "generate" in words
        else []
    )
    done = shell(
        [sys.executable, "-m", "photon_ext", words[0], *options, *words[1:]], "> /dev/full"
    )
    name = "photon-ext" if what == "--help" else f"photon-ext {words[0]}"
    told = (
        f"{name}: stdout cannot be written (No space left on device); send it to where there "
        "is "
        "room\n"
    )
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("streams", ["2>&-", "2> /dev/full"])
@pytest.mark.parametrize("option", ["--raw", "--meter"])
def test_without_a_stderr_there_is_the_text_alone(model: str, streams: str, option: str) -> None:
    done = shell(command("w5 w6", "--model", model, "--max-new-tokens", "5", option), streams)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"w\d+( w\d+){4}\n", done.stdout)


def test_without_a_stderr_mistakes_are_told_nowhere_else(model: str) -> None:
    done = shell(command("w5", "--model", model, "--depth", "3"), "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_stdout_that_is_closed_is_told_before_any_work() -> None:
    done = shell(command("w5", "--model", "/nowhere"), ">&-")
    assert (done.returncode, done.stderr) == (
        2,
        "photon-ext: stdout is closed; open it, or send it to /dev/null\n",
    )


@pytest.mark.parametrize(("name", "option"), [("generate", "--max-len"), ("trace", "--batch")])
def test_memory_that_the_host_does_not_have_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    tmp_path: Path,
    name: str,
    option: str,
) -> None:
    monkeypatch.setattr(
        "photon_ext.engine.engine.Decoder",
        lambda *args, **options: torch.empty(2**60, dtype=torch.int8),
    )
    arguments = ["w5"] if name == "generate" else ["--out", str(tmp_path)]
    code, out, err = run(capsys, name, *arguments, "--model", model, "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"photon-ext {name}: out of memory: ")
    assert "allocate 1152921504606846976 bytes" in err
    assert err.endswith(f"; lower {option}\n")
