"""/v1/messages, by the `anthropic` package as it is, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

from tests.serve.http.server import HELLO, post, says  # noqa: E402
from tests.serve.http.stub import StubClient, busy  # noqa: E402
from tests.serve.http.words import THINKS, ids_of, text_of  # noqa: E402

PATH = "/v1/messages"
BODY = {"model": "stub", "max_tokens": 100, "messages": HELLO}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def client(address: str, engine: StubClient) -> Iterator[Any]:
    engine.script, engine.refusal = says("Hello!", cached=4), None
    engine.asks.clear()
    with anthropic.Anthropic(base_url=address, api_key="key", max_retries=0) as made:
        yield made


def test_an_answer(client: Any, engine: StubClient) -> None:
    answer = client.messages.create(**BODY, system="Be kind.", metadata={"user_id": "me"})
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "Hello!")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = len(engine.asks[0].ids)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 4, 4)
    assert usage.output_tokens == 7
    assert text_of([*engine.asks[0].ids]).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    count = client.messages.count_tokens(model="stub", messages=HELLO, system="Be kind.")
    assert count.input_tokens == prompt


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_thoughts_text_and_calls_are_blocks(client: Any, engine: StubClient, cut: int) -> None:
    fields = {**BODY, "max_tokens": 400, "tools": [WEATHER]}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    engine.script = says(THINKS, cuts=(cut,))
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        thought, text, call = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "Wait.\n")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Röm"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == len(ids_of(THINKS)) + 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_results_of_tools_and_calls_go_back_to_the_template(
    client: Any, engine: StubClient
) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain", "is_error": True}
    text = {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Look."}, use]},
        {"role": "user", "content": [result, text]},
    ]
    client.messages.create(**{**BODY, "messages": turns}, tools=[WEATHER])
    told = text_of([*engine.asks[0].ids])
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in told
    assert "tool\nError: rain<|im_end|>\n<|im_start|>user\nAnd?" in told


def test_an_answer_may_be_begun(client: Any, engine: StubClient) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "I am"}]
    client.messages.create(**{**BODY, "messages": turns})
    assert text_of([*engine.asks[0].ids]).endswith("assistant\nI am")


def test_reasons(client: Any, engine: StubClient) -> None:
    answer = client.messages.create(**BODY, stop_sequences=["ll"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "ll")
    assert answer.content[0].text == "He"
    answer = client.messages.create(**{**BODY, "max_tokens": 2})
    assert answer.stop_reason == "max_tokens"
    engine.script = says('{"name": "weather", "arguments": {"city": "Rome"}}')
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(**BODY, tools=[WEATHER], tool_choice=choice)
        assert answer.stop_reason == "tool_use"


def test_errors_are_the_clients_own(client: Any, engine: StubClient, address: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**{**BODY, "max_tokens": 0})
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**BODY, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="no").messages.create(**BODY)
    engine.refusal = busy()
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(**BODY)
    engine.refusal, engine.script = None, says("Hello", fails_after=2)
    with pytest.raises(anthropic.APIStatusError, match="ended"):
        list(client.messages.create(**BODY, stream=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"frobnicate": 1},
        {"mcp_servers": [{"name": "x"}]},
        {"temperature": 1.5},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "any"}},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        {"messages": []},
        {"system": [{"type": "image"}]},
    ],
)
def test_what_is_not_supported_is_refused(model_dir: Path, fields: dict[str, Any]) -> None:
    client = StubClient(says("Hi"))
    response = post(client, model_dir, PATH, {**BODY, **fields})
    assert response.status_code == 400, response.text
    error = json.loads(response.text)
    assert error["type"] == "error"
    assert {*error["error"]} == {"type", "message"}
    assert client.asks == []
