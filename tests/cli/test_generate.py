"""`photon-ext generate`: what it prints where, and what it says to mistakes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch

import photon_ext
from photon_ext.models.loading.loader import LoadedModel
from tests.cli.command import run
from tests.models.adapters import adapter_tensors, saved_adapter
from tests.models.tiny import saved_tiny_model

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "prompt_tokens",
    "cached_tokens",
    "ttft_ms",
    "tokens_per_s",
    "step_gap_us",
    "steps",
    "zombie_rows",
    "depth",
    "device",
}


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


def test_json_has_the_log_probabilities_that_were_asked_for(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    common = ("generate", "w5 w6", "--model", model, "--device", "cpu", "--json")
    short = (*common, "--max-new-tokens", "3")
    assert "logprobs" not in json.loads(run(capsys, *short)[1])
    result = json.loads(run(capsys, *short, "--logprobs", "2")[1])
    assert [found["token_id"] for found in result["logprobs"]] == result["token_ids"]
    for found in result["logprobs"]:  # greedy
        assert len(found["top"]) == 2
        assert found["top"][0] == [found["token_id"], found["logprob"], found["text"]]
        assert found["text"] == f"w{found['token_id']}"


def test_text_goes_to_stdout_and_the_summary_to_stderr(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    common = ("generate", "w5 w6 w7", "--model", model, "--device", "cpu", "--max-new-tokens", "7")
    text = json.loads(run(capsys, *common, "--json")[1])["text"]
    code, out, err = run(capsys, *common)
    assert (code, out) == (0, text + "\n")
    assert err.count("\n") == 1
    assert all(part in err for part in ("tokens/s", "step gap", "depth 2", "cpu"))
    _, _, err = run(capsys, *common[:-1], "1")
    assert re.match(r"\[1 token \(length\), first token after \d+ ms, step gap ", err)


def test_hopper_kernels_that_do_not_run_here_are_said_so_and_change_nothing(
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
    code, out, errors = run(capsys, *arguments, "--backend", "hopper")
    assert (code, json.loads(out)["token_ids"]) == (0, json.loads(plain)["token_ids"])
    assert (
        errors
        == "photon-ext generate: --backend hopper changes nothing on cpu; photon-ext info says "
        "which kernels run\n"
    )


def test_a_message_of_any_length_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def refuse(path: object) -> None:
        raise photon_ext.ModelError("x" * 100_000)

    monkeypatch.setattr("photon_ext.cli.model.resolve_model", refuse)
    code, _, err = run(capsys, "generate", "w5", "--model", model)
    assert code == 2
    assert 1000 < len(err) < 2100


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


def test_a_prompt_comes_from_stdin(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--model", model, "--device", "cpu", "--max-new-tokens", "3", "--json")
    given = json.loads(run(capsys, "generate", "w5 w6 w7", *common)[1])
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n"))
    code, out, err = run(capsys, "generate", "-", *common)
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] == given["token_ids"]


def test_a_stdin_that_is_no_text_is_a_mistake(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    code, out, err = run(capsys, "generate", "-", "--model", model, "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stdin is no text" in err


def test_a_system_message_comes_before_the_prompt(
    capsys: pytest.CaptureFixture[str], chat_model: str
) -> None:
    common = ("generate", "w5 w6", "--model", chat_model, "--device", "cpu", "--json")
    plain = json.loads(run(capsys, *common)[1])
    asked = json.loads(run(capsys, *common, "--system", "w7")[1])
    assert (plain["prompt_tokens"], asked["prompt_tokens"]) == (3, 5)  # w2 w5 w6; w1 w7 before it
    code, _, err = run(capsys, *common, "--system", "w7", "--raw")
    assert code == 2
    assert "--system needs the chat template, which --raw leaves out" in err


def test_a_stop_text_ends_the_answer_and_is_cut_off(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    common = ("generate", "w5 w6 w7", "--model", model, "--device", "cpu", "--json")
    words = json.loads(run(capsys, *common, "--max-new-tokens", "12")[1])["text"].split()
    result = json.loads(run(capsys, *common, "--stop", "nowhere", "--stop", words[3])[1])
    assert result["text"].split() == words[: words.index(words[3])]
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", words[3])


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
        (("--backend", "fast"), "--backend: invalid choice: 'fast'"),
        (("--stop", ""), "stop holds ''"),
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
    assert "the prompt is empty; give the user's message" in err


def test_no_command_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "--help" in err


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
        "photon_ext.engine.parts.Decoder",
        lambda *args, **options: torch.empty(2**60, dtype=torch.int8),
    )
    arguments = ["w5"] if name == "generate" else ["--out", str(tmp_path)]
    code, out, err = run(capsys, name, *arguments, "--model", model, "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"photon-ext {name}: out of memory: ")
    assert "allocate 1152921504606846976 bytes" in err
    assert err.endswith(f"; lower {option}\n")


def test_an_answer_ends_after_its_timeout_with_what_it_has_and_says_so(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    common = ("generate", "w5", "--model", model, "--device", "cpu", "--max-new-tokens", "7")
    code, out, err = run(capsys, *common, "--timeout", "0", "--json")
    told = "photon-ext generate: the answer is not complete: its --timeout has passed\n"
    assert (code, err) == (1, told)
    assert (json.loads(out)["finish_reason"], json.loads(out)["token_ids"]) == ("timeout", [])
    code, out, _ = run(capsys, *common, "--timeout", "600", "--json")
    assert (code, json.loads(out)["finish_reason"] in ("length", "stop")) == (0, True)
    code, _, err = run(capsys, *common, "--timeout", "0")
    assert (code, "0 tokens (timeout)" in err, err.endswith(told)) == (1, True, True)


@pytest.mark.parametrize(
    ("timeout", "message"),
    [
        ("-1", "it is -1.0; give seconds >= 0"),
        ("nan", "it is nan; give seconds >= 0"),
        ("soon", "could not convert string to float: 'soon'"),
    ],
)
def test_a_timeout_that_is_no_time_is_refused(
    capsys: pytest.CaptureFixture[str], timeout: str, message: str
) -> None:
    code, _, err = run(capsys, "generate", "w5", f"--timeout={timeout}")
    assert code == 2
    assert f"argument --timeout: {message}" in err


def test_the_form_of_an_answer_is_asked_for(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    smollm2: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("photon_ext.engine.engine.load_model", lambda *given: smollm2)
    file = tmp_path / "schema.json"
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}'
    file.write_text(schema, encoding="utf-8-sig")  # as editors on Windows begin a file
    common = ("generate", "Is the sky blue?", "--device", "cpu")
    for flags, form in (
        (("--choice", "Yes,No"), "Yes|No"),
        (("--choice", "Yes, I do", "--choice", "No"), "Yes, I do|No"),
        (("--regex", "[0-9]{4}"), "[0-9]{4}"),
        (("--json-schema", str(file)), r"\[[12],[12]\]"),
    ):
        code, out, _ = run(capsys, *common, *flags)
        assert code == 0
        assert re.fullmatch(form, out.removesuffix("\n"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--json-schema", "nowhere.json"), "--json-schema 'nowhere.json' cannot be read"),
        (("--choice", "a,,b"), "choice holds ''; give non-empty strings"),
        (("--choice", "a", "--regex", "b"), "--regex: not allowed with argument --choice"),
    ],
)
def test_a_form_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, flags: tuple[str, ...], told: str
) -> None:
    code, out, err = run(capsys, "generate", "w5", "--model", model, "--device", "cpu", *flags)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_an_adapter_changes_the_answer_and_a_bad_one_is_told(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    common = ("--model", model, "--device", "cpu", "--max-new-tokens", "7", "--json")
    _, plain, _ = run(capsys, "generate", "w5 w6 w7", *common)
    from transformers import AutoModelForCausalLM

    tensors = adapter_tensors(AutoModelForCausalLM.from_pretrained(model), 4, seed=1)
    folder = str(saved_adapter(tmp_path / "adapter", tensors, 4))
    code, out, err = run(capsys, "generate", "w5 w6 w7", *common, "--lora", folder)
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] != json.loads(plain)["token_ids"]
    wrong = (*common, "--lora", folder, "--lora-rank", "3")
    code, out, err = run(capsys, "generate", "w5", *wrong)
    assert (code, out) == (2, "")
    assert "r is 4, and the engine's slots hold ranks up to 3" in err
