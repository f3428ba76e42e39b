"""/v1/completions, /tokenize and /detokenize, over a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from photon_ext.serve.contract import Ask, End
from tests.serve.http.server import COMPLETIONS, each_says, events_of, post, says
from tests.serve.http.stub import Script, StubClient
from tests.serve.http.words import ids_of, text_of


def ask(model_dir: Path, client: StubClient, **fields: Any) -> Any:
    response = post(client, model_dir, COMPLETIONS, {"prompt": "Once", **fields})
    assert response.status_code == 200, response.text
    return events_of(response) if fields.get("stream") else response.json()


def refused(model_dir: Path, **fields: Any) -> dict[str, Any]:
    client = StubClient(says("Hello"))
    response = post(client, model_dir, COMPLETIONS, {"prompt": "Once", **fields})
    assert response.status_code == 400, response.text
    assert client.asks == []
    error: dict[str, Any] = response.json()["error"]
    return error


def named(ask: Ask, index: int) -> list[int]:
    """The prompt once more, and which answer it is."""
    return ids_of(f"{text_of([*ask.ids])}{index}<|im_end|>")


def texts(events: list[dict[str, Any]], count: int) -> list[str]:
    found = [""] * count
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    return found


def test_a_prompt_goes_on(model_dir: Path) -> None:
    client = StubClient(says(" upon a time", stops=False))
    answer = ask(model_dir, client, max_tokens=5)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" upon", "length")
    assert answer["object"] == "text_completion"
    assert client.asks[0].ids == tuple(ids_of("Once"))


def test_the_cap_is_sixteen_where_none_is_given(model_dir: Path) -> None:
    client = StubClient(says("x" * 30))
    assert ask(model_dir, client)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_may_be_texts_or_ids_and_several(model_dir: Path, stream: bool) -> None:
    pair = [ids_of("a"), ids_of("b")]
    for prompt in ("a", ids_of("a"), ["a", "b"], pair):
        client = StubClient(Script(named))
        several = isinstance(prompt[0], list) or prompt == ["a", "b"]
        expected = ["a0", "a1", "b0", "b1"] if several else ["a0", "a1"]
        answer = ask(model_dir, client, prompt=prompt, n=2, stream=stream)
        if stream:
            assert texts(answer, len(expected)) == expected
        else:
            assert [choice["text"] for choice in answer["choices"]] == expected
            assert [choice["index"] for choice in answer["choices"]] == [*range(len(expected))]
            assert answer["usage"]["prompt_tokens"] == 1 + several
        assert client.running == 0


@pytest.mark.parametrize(
    "prompt", ["", [], [1, "a"], ["a", [1]], [[]], [[1], []], None, 5, [True], [300], [-1]]
)
def test_what_is_no_prompt_is_refused(model_dir: Path, prompt: Any) -> None:
    assert refused(model_dir, prompt=prompt)["param"] == "prompt"


def test_one_prompt_that_is_refused_refuses_all(model_dir: Path) -> None:
    assert refused(model_dir, prompt=[ids_of("fine"), [999]])["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_prompt_and_answer(model_dir: Path, stream: bool) -> None:
    client = StubClient(says("cd"))
    fields = {"echo": True, "logprobs": 1, "n": 2}
    answer = ask(model_dir, client, prompt="ab", **fields, stream=stream)
    if stream:
        assert texts(answer, 2) == ["abcd"] * 2
        told = [one["choices"][0]["logprobs"] for one in answer if one["choices"][0]["index"] == 1]
        logprobs = {key: [each for one in told for each in one[key]] for key in told[0]}
    else:
        choice = answer["choices"][1]
        assert choice["text"] == "abcd"
        logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_a_prompt_is_scored_alone(model_dir: Path) -> None:
    client = StubClient(says("cd"))
    answer = ask(model_dir, client, prompt=ids_of("ab"), echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_best_of_is_all_of_them(model_dir: Path) -> None:
    client = StubClient(each_says("a", "b"))
    assert len(ask(model_dir, client, n=2, best_of=2)["choices"]) == 2
    assert refused(model_dir, n=1, best_of=2)["param"] == "best_of"
    assert refused(model_dir, suffix="the end")["param"] == "suffix"


def test_logprobs_are_a_number_of_tokens(model_dir: Path) -> None:
    assert ask(model_dir, StubClient(says("a")), logprobs=False)["choices"][0]["logprobs"] is None
    assert refused(model_dir, logprobs=True)["param"] == "logprobs"
    assert refused(model_dir, logprobs=21)["param"] == "logprobs"


def test_texts_become_ids_and_ids_texts(model_dir: Path) -> None:
    client = StubClient(says(""))
    given = {"prompt": "Hé<|im_end|>", "return_token_strs": True}
    found = post(client, model_dir, "/tokenize", given).json()
    ids = ids_of("Hé<|im_end|>")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert found["token_strs"] == ["H", "\ufffd", "\ufffd", "<|im_end|>"]
    told = post(client, model_dir, "/detokenize", {"tokens": ids}).json()
    assert told == {"prompt": "Hé<|im_end|>"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    found = post(client, model_dir, "/tokenize", chat).json()
    assert text_of(found["tokens"]) == "<|im_start|>user\nHi<|im_end|>\n"
    for wrong in ({}, {"prompt": "a", **chat}):
        assert post(client, model_dir, "/tokenize", wrong).status_code == 400
    assert post(client, model_dir, "/detokenize", {"tokens": [300]}).status_code == 400


def test_scores_of_a_prompt_are_waited_for_where_an_answer_is_cut_before(model_dir: Path) -> None:
    late = StubClient(says("Hello you", scores_from=6))
    (choice,) = ask(model_dir, late, prompt_logprobs=1, stop="el")["choices"]
    assert (choice["text"], choice["finish_reason"], late.running) == ("H", "stop", 0)
    assert len(choice["prompt_logprobs"]) == len(ids_of("Once"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_before_its_prompt_is_scored_says_so(
    model_dir: Path, stream: bool
) -> None:
    """It was an answer without a finish reason."""
    none = StubClient(says("", End("timeout"), stops=False, scores_from=1))
    answer = ask(model_dir, none, echo=True, logprobs=1, n=2, stream=stream)
    events = answer if stream else [answer]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["length"] * 2
