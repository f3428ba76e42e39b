"""`photon-ext generate`: what it prints where, and what it says to mistakes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import photon_ext
from photon_ext.models.loading.loader import LoadedModel
from tests.cli.command import run
from tests.models.adapters import adapter_tensors, saved_adapter
from tests.models.tiny import saved_tiny_model

KEYS = {
    *("text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "cached_tokens"),
    *("ttft_ms", "tokens_per_s", "step_gap_us", "steps", "zombie_rows", "depth", "device"),
}
Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("depth", [1, 2])
def test_json_is_one_object_and_nothing_else(generate: Command, depth: int) -> None:
    options = "--max-new-tokens", "7", "--depth", str(depth), "--json"
    code, out, err = generate("w5 w6 w7", *options)
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


def test_json_has_the_log_probabilities_that_were_asked_for(generate: Command) -> None:
    short = "w5 w6", "--json", "--max-new-tokens", "3"
    assert "logprobs" not in json.loads(generate(*short)[1])
    result = json.loads(generate(*short, "--logprobs", "2")[1])
    assert [found["token_id"] for found in result["logprobs"]] == result["token_ids"]
    for found in result["logprobs"]:  # greedy
        assert len(found["top"]) == 2
        assert found["top"][0] == [found["token_id"], found["logprob"], found["text"]]
        assert found["text"] == f"w{found['token_id']}"


def test_keys_and_values_may_be_in_fp8(generate: Command) -> None:
    short = "w5 w6 w7 w8 w9", "--json", "--max-new-tokens", "5", "--logprobs", "0"
    plain, fp8 = (json.loads(generate(*short, *more)[1]) for more in ((), ("--kv-dtype", "fp8")))
    logprobs = [[found["logprob"] for found in result["logprobs"]] for result in (plain, fp8)]
    assert logprobs[0] != logprobs[1]
    assert logprobs[1][0] == pytest.approx(logprobs[0][0], abs=0.2)


def test_text_goes_to_stdout_and_the_summary_to_stderr(generate: Command) -> None:
    common = "w5 w6 w7", "--max-new-tokens", "7"
    text = json.loads(generate(*common, "--json")[1])["text"]
    code, out, err = generate(*common)
    assert (code, out) == (0, text + "\n")
    assert err.count("\n") == 1
    assert all(part in err for part in ("tokens/s", "step gap", "depth 2", "cpu"))
    _, _, err = generate(*common[:-1], "1")
    assert re.match(r"\[1 token \(length\), first token after \d+ ms, step gap ", err)


def test_hopper_kernels_that_do_not_run_here_are_said_so_and_change_nothing(
    generate: Command,
) -> None:
    arguments = "w5 w6", "--raw", "--max-new-tokens", "4", "--json"
    _, plain, errors = generate(*arguments)
    assert errors == ""
    code, out, errors = generate(*arguments, "--backend", "hopper")
    assert (code, json.loads(out)["token_ids"]) == (0, json.loads(plain)["token_ids"])
    told = "--backend hopper changes nothing on cpu; photon-ext info says which kernels run"
    assert errors == f"photon-ext generate: {told}\n"


def test_a_message_of_any_length_is_cut(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise photon_ext.ModelError("x" * 100_000)

    monkeypatch.setattr("photon_ext.cli.model.resolve_model", refuse)
    code, _, err = generate("w5")
    assert code == 2
    assert 1000 < len(err) < 2100


def test_a_seed_repeats_a_sampled_answer(generate: Command) -> None:
    common = "w5", "--temperature", "1.5", "--json", "--seed"
    answers = [json.loads(generate(*common, seed)[1])["token_ids"] for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]


def test_a_prompt_comes_from_stdin(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    common = "--max-new-tokens", "3", "--json"
    given = json.loads(generate("w5 w6 w7", *common)[1])
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n"))
    code, out, err = generate("-", *common)
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] == given["token_ids"]


def test_a_stdin_that_is_no_text_is_a_mistake(
    generate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    code, out, err = generate("-")
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


def test_a_stop_text_ends_the_answer_and_is_cut_off(generate: Command) -> None:
    common = "w5 w6 w7", "--json"
    words = json.loads(generate(*common, "--max-new-tokens", "12")[1])["text"].split()
    result = json.loads(generate(*common, "--stop", "nowhere", "--stop", words[3])[1])
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
        (("--timeout=-1",), "argument --timeout: it is -1.0; give seconds >= 0"),
        (("--timeout=nan",), "argument --timeout: it is nan; give seconds >= 0"),
        (("--timeout=soon",), "--timeout: could not convert string to float: 'soon'"),
        (("--json-schema", "nowhere.json"), "--json-schema 'nowhere.json' cannot be read"),
        (("--choice", "a,,b"), "choice holds ''; give non-empty strings"),
        (("--choice", "a", "--regex", "b"), "--regex: not allowed with argument --choice"),
    ],
)
def test_mistakes_are_told_in_one_line_with_exit_code_two(
    generate: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = generate("w5 w6 w7", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("photon-ext")
    assert message in err


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give the user's message"),
        ("w5 \udcff", "the prompt holds a surrogate, U+DCFF"),
    ],
)
def test_a_prompt_that_is_no_text_is_a_mistake_too(
    generate: Command, prompt: str, message: str
) -> None:
    code, out, err = generate(prompt)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_no_command_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "--help" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"photon-ext {photon_ext.__version__}\n", "")


def test_a_model_without_its_tokenizer_says_where_to_put_it(
    generate: Command, tmp_path: Path
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    code, _, err = generate("w5", "--model", str(tmp_path))
    told = "has no tokenizer.json; copy it there (save_pretrained of the tokenizer)"
    assert (code, err) == (2, f"photon-ext generate: {tmp_path} {told}\n")


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


def test_an_answer_ends_after_its_timeout_with_what_it_has_and_says_so(generate: Command) -> None:
    common = "w5", "--max-new-tokens", "7"
    code, out, err = generate(*common, "--timeout", "0", "--json")
    told = "photon-ext generate: the answer is not complete: its --timeout has passed\n"
    assert (code, err) == (1, told)
    assert (json.loads(out)["finish_reason"], json.loads(out)["token_ids"]) == ("timeout", [])
    code, out, _ = generate(*common, "--timeout", "600", "--json")
    assert (code, json.loads(out)["finish_reason"] in ("length", "stop")) == (0, True)
    code, _, err = generate(*common, "--timeout", "0")
    assert (code, "0 tokens (timeout)" in err, err.endswith(told)) == (1, True, True)


def test_the_form_of_an_answer_is_asked_for(
    generate: Command, tmp_path: Path, smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("photon_ext.engine.engine.load_model", lambda *given: smollm2)
    file = tmp_path / "schema.json"
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}'
    file.write_text(schema, encoding="utf-8-sig")  # as editors on Windows begin a file
    for flags, form in (
        (("--choice", "Yes,No"), "Yes|No"),
        (("--choice", "Yes, I do", "--choice", "No"), "Yes, I do|No"),
        (("--regex", "[0-9]{4}"), "[0-9]{4}"),
        (("--json-schema", str(file)), r"\[[12],[12]\]"),
    ):
        code, out, _ = generate("Is the sky blue?", *flags)
        assert code == 0
        assert re.fullmatch(form, out.removesuffix("\n"))


def test_an_adapter_changes_the_answer_and_a_bad_one_is_told(
    generate: Command, model: str, tmp_path: Path
) -> None:
    common = "w5 w6 w7", "--max-new-tokens", "7", "--json"
    _, plain, _ = generate(*common)
    from transformers import AutoModelForCausalLM

    tensors = adapter_tensors(AutoModelForCausalLM.from_pretrained(model), 4, seed=1)
    folder = str(saved_adapter(tmp_path / "adapter", tensors, 4))
    code, out, err = generate(*common, "--lora", folder)
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] != json.loads(plain)["token_ids"]
    code, out, err = generate(*common, "--lora", folder, "--lora-rank", "3")
    assert (code, out) == (2, "")
    assert "r is 4, and the engine's slots hold ranks up to 3" in err
