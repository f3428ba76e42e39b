"""/v1/chat/completions: fields and answers, over a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from photon_ext.serve.contract import End
from tests.serve.http.server import CHAT, HELLO, each_says, events_of, post, says, text_of_events
from tests.serve.http.stub import StubClient
from tests.serve.http.words import ids_of, text_of

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def ask(model_dir: Path, client: StubClient, **fields: Any) -> Any:
    response = post(client, model_dir, CHAT, {"model": "stub", "messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return events_of(response) if fields.get("stream") else response.json()


def refused(model_dir: Path, **fields: Any) -> dict[str, Any]:
    client = StubClient(says("Hello"))
    response = post(client, model_dir, CHAT, {"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    assert client.asks == []
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_an_answer_has_the_text_of_its_tokens(model_dir: Path) -> None:
    client = StubClient(says("Hello!", cached=16))
    answer = ask(model_dir, client)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert answer["model"] == "stub"
    prompt = len(ids_of(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 7,
        "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert text_of(list(client.asks[0].ids)) == PROMPT
    assert client.running == 0


def test_a_stream_has_the_same_text(model_dir: Path) -> None:
    client = StubClient(says("Hello!", cuts=(2, 1, 3)))
    events = ask(model_dir, client, stream=True)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of_events(events) == "Hello!"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
    assert len({event["id"] for event in events}) == 1


def test_parameters_go_to_the_engine_by_its_names(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    given = {
        "temperature": 0.5,
        "top_p": 0,
        "top_k": -1,
        "min_p": 0.1,
        "min_tokens": 1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -3},
        "bad_words": ["no"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_completion_tokens": 9,
        "prompt_logprobs": 2,
    }
    ask(model_dir, client, **given, seed=-1, priority=3, timeout_s=2.5, cache_salt="salt", n=2)
    (asked,) = client.asks
    names = {key: given[key] for key in given if key != "max_completion_tokens"}
    assert asked.params == {
        **names,
        "top_p": 1e-6,
        "top_k": 0,
        "logit_bias": {5: -3.0},
        "max_new_tokens": 9,
        "seed": 2**64 - 1,
        "logprobs": None,
    }
    assert (asked.n, asked.priority, asked.timeout_s, asked.cache_salt) == (2, 3, 2.5, "salt")


def test_neutral_values_pass(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_k": -1,
        "store": False,
        "user": "somebody",
        "stop": None,
        "tools": None,
        "service_tier": "auto",
        "modalities": ["text"],
        "functions": [],
        "response_format": {"type": "text"},
        "length_penalty": 1,
        "stream": None,
        "top_logprobs": 0,
        "logit_bias": {},
        "metadata": {"run": "7"},
    }
    assert ask(model_dir, client, **neutral)["metadata"] == {"run": "7"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("service_tier", "flex"),
        ("use_beam_search", True),
        ("frobnicate", 1),
        ("frobnicate", None),
        ("stream_options", {"include_usage": True}),
        ("n", 0),
        ("temperature", "1"),
        ("temperature", True),
        ("max_tokens", 3.5),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("seed", 2**64),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(model_dir: Path, field: str, value: Any) -> None:
    error = refused(model_dir, **{field: value})
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_parts_that_are_no_text_are_refused_by_name(model_dir: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "What is this?"}
    error = refused(model_dir, messages=[{"role": "user", "content": [text, image]}])
    assert error["param"] == "messages[0].content[1]"
    assert "'image_url'" in error["message"]


def test_text_parts_are_joined_and_developers_are_the_system(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask(model_dir, client, messages=[{"role": "developer", "content": parts}])
    begin = "<|im_start|>system\nab<|im_end|>"
    assert text_of(list(client.asks[0].ids)).startswith(begin)


def test_names_of_special_tokens_in_messages_are_text(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    ask(model_dir, client, messages=[{"role": "user", "content": "<|im_end|>"}])
    assert client.asks[0].ids.count(ids_of("<|im_end|>")[0]) == 1


def test_a_message_goes_on(model_dir: Path) -> None:
    client = StubClient(says(" and well"))
    messages = [*HELLO, {"role": "assistant", "content": "I am fine"}]
    ask(model_dir, client, messages=messages, continue_final_message=True)
    assert text_of(list(client.asks[0].ids)).endswith("assistant\nI am fine")


def test_template_kwargs_reach_the_template(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    ask(model_dir, client, chat_template_kwargs={"enable_thinking": False})
    assert text_of(list(client.asks[0].ids)).endswith("<think>\n\n</think>\n\n")
    error = refused(model_dir, chat_template_kwargs={"nonsense": 1})
    assert error["param"] == "chat_template_kwargs"


def test_adapters_are_models(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    assert ask(model_dir, client, model="poet")["model"] == "poet"
    assert ask(model_dir, client, model="alias")["model"] == "stub"
    assert [asked.adapter for asked in client.asks] == ["poet", None]


def test_a_stop_string_ends_the_answer_and_is_not_shown(model_dir: Path) -> None:
    client = StubClient(says("one two three four"))
    answer = ask(model_dir, client, stop=["thr", "zzz"])
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "one two "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "thr")
    assert answer["usage"]["completion_tokens"] == len("one two thr")
    assert client.cancelled == [(0, 0)]


def test_a_stop_string_is_shown_where_that_is_asked(model_dir: Path) -> None:
    answer = ask(model_dir, StubClient(says("a.b")), stop=".", include_stop_str_in_output=True)
    assert answer["choices"][0]["message"]["content"] == "a."


def test_a_stop_token_is_named(model_dir: Path) -> None:
    token = ids_of("!")[0]
    answer = ask(model_dir, StubClient(says("Hi!", stops=False)), stop_token_ids=[token])
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hi"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_a_request_whose_time_is_over_has_what_there_is(model_dir: Path) -> None:
    client = StubClient(says("Hel", End("timeout"), stops=False))
    (choice,) = ask(model_dir, client, timeout_s=1)["choices"]
    assert choice["message"]["content"] == "Hel"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


def test_no_token_is_shown_where_none_is_asked_for(model_dir: Path) -> None:
    client = StubClient(says("Hello"))
    answer = ask(model_dir, client, max_tokens=0)
    assert client.asks[0].params["max_new_tokens"] == 1
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_log_probabilities_are_of_the_tokens_shown(model_dir: Path) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    answer = ask(model_dir, StubClient(says("Hé")), **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "Hé"
    assert [each["logprob"] for each in content] == [-0.5] * 3
    assert [[top["logprob"] for top in each["top_logprobs"]] for each in content] == [
        [-0.5, -1.5]
    ] * 3
    streamed = ask(model_dir, StubClient(says("Hé", cuts=(3,))), **fields, stream=True)
    told = [event["choices"][0]["logprobs"] for event in streamed]
    assert [each for one in told if one for each in one["content"]] == content


def test_prompts_have_log_probabilities_by_id(model_dir: Path) -> None:
    answer = ask(model_dir, StubClient(says("Hi")), prompt_logprobs=1)
    ids, scores = ids_of(PROMPT), answer["prompt_logprobs"]
    assert len(scores) == len(ids)
    assert scores[0] is None
    token = text_of([ids[1]])
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": token}
    assert scores[1] == {str(ids[1]): entry}
    assert refused(model_dir, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_scores_of_a_prompt_are_waited_for_where_an_answer_is_cut_before(model_dir: Path) -> None:
    late = StubClient(says("Hello you", scores_from=6))
    answer = ask(model_dir, late, prompt_logprobs=1, stop="el")
    assert (answer["choices"][0]["message"]["content"], late.running) == ("H", 0)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert None not in answer["prompt_logprobs"][1:]
    assert len(answer["prompt_logprobs"]) == len(ids_of(PROMPT))
    none = StubClient(says("", End("timeout"), stops=False, scores_from=1))
    choice = ask(model_dir, none, prompt_logprobs=1)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


def test_usage_comes_so_far_where_that_is_asked(model_dir: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(model_dir, StubClient(says("abc")), stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_what_a_model_gave_may_be_sent_back_as_it_is(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    message = ask(model_dir, client)["choices"][0]["message"]
    copied = {**message, "annotations": [], "audio": None, "function_call": None}
    copied |= {"tool_calls": None, "parsed": {"a": 1}}  # which the openai package adds
    ask(model_dir, client, messages=[*HELLO, copied, *HELLO])
    assert "assistant\nHi<|im_end|>" in text_of(list(client.asks[1].ids))


def test_calls_are_told_to_the_template_as_values(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    function = {"name": "f", "arguments": json.dumps({"x": "ü"}), "parsed_arguments": {"x": "ü"}}
    call = {"id": "call_1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
    ask(model_dir, client, messages=[*HELLO, turn, result])
    assert '{"name": "f", "arguments": {"x": "ü"}}' in text_of(list(client.asks[0].ids))


def test_two_caps_that_differ_are_refused(model_dir: Path) -> None:
    error = refused(model_dir, max_tokens=1, max_completion_tokens=2)
    assert error["param"] == "max_completion_tokens"
    client = StubClient(each_says("Hi"))
    ask(model_dir, client, max_tokens=2, max_completion_tokens=2)
    assert client.asks[0].params["max_new_tokens"] == 2


def test_a_prompt_that_the_context_does_not_hold_is_refused(model_dir: Path) -> None:
    for characters in (600, 20_000_000):
        messages = [{"role": "user", "content": "x" * characters}]
        error = refused(model_dir, messages=messages)
        assert "512" in error["message"]
    assert error["code"] == "context_length_exceeded"
