"""/v1/responses, by the `openai` package as it is, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.http.server import post, says
from tests.serve.http.stub import StubClient
from tests.serve.http.words import THINKS, ids_of, text_of

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture
def client(address: str, engine: StubClient) -> Iterator[Any]:
    engine.script = says("Hello!", cached=4)
    engine.asks.clear()
    with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as made:
        yield made


def test_a_response(client: Any, engine: StubClient) -> None:
    answer = client.responses.create(
        model="stub", input="Hi", instructions="Be kind.", store=False, metadata={"run": "7"}
    )
    assert (answer.output_text, answer.status) == ("Hello!", "completed")
    assert answer.metadata == {"run": "7"}
    assert answer.usage.input_tokens == len(engine.asks[0].ids)
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.output_tokens == 7
    assert text_of([*engine.asks[0].ids]).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    answer = client.responses.create(model="stub", input="Hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_fields_of_sampling_that_gateways_add_are_honoured(client: Any, engine: StubClient) -> None:
    """smg adds all of these, neutral where a request has none."""
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "priority": 0}
    client.responses.create(model="stub", input="Hi", store=False, extra_body=neutral)
    given = {"top_k": 3, "min_p": 0.5, "repetition_penalty": 1.25, "priority": 7}
    client.responses.create(model="stub", input="Hi", store=False, extra_body=given)
    first, second = engine.asks
    assert (first.params["top_k"], first.priority) == (0, 0)
    assert second.priority == given.pop("priority")
    assert given.items() <= second.params.items()


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_thoughts_text_and_calls_are_items(client: Any, engine: StubClient, cut: int) -> None:
    engine.script = says(THINKS, cuts=(cut,))
    fields = {"model": "stub", "input": "Hi", "tools": [WEATHER]}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thought, message, call = answer.output
        assert [part.text for part in thought.content] == ["hm"]
        assert [part.text for part in message.content] == ["Wait.\n"]
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "weather",
            '{"city": "Röm"}',
        )
        assert answer.usage.output_tokens == len(ids_of(THINKS)) + 1
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    assert [event.sequence_number for event in events] == [*range(len(events))]


def test_what_came_goes_back(client: Any, engine: StubClient) -> None:
    engine.script = says(THINKS)
    fields = {"model": "stub", "tools": [WEATHER]}
    first = client.responses.create(**fields, input="Hi")
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    turns = [{"role": "user", "content": "Hi"}, *first.output, output]
    client.responses.create(**fields, input=turns)
    told = text_of([*engine.asks[1].ids])
    assert "assistant\nWait.\n" in told
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}' in told
    assert "<|im_start|>tool\nrain<|im_end|>" in told
    assert told.count("<|im_start|>assistant") == 2


def test_a_form(client: Any, engine: StubClient) -> None:
    engine.script = says('{"a":1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    client.responses.create(model="stub", input="Hi", text=form)
    assert engine.asks[0].params["json_schema"] == schema


def test_an_error_inside_a_stream_is_an_event(client: Any, engine: StubClient) -> None:
    engine.script = says("Hello", fails_after=2)
    with pytest.raises(openai.APIError, match="ended"):
        list(client.responses.create(model="stub", input="Hi", stream=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    model_dir: Path, fields: dict[str, Any], param: str
) -> None:
    client = StubClient(says("Hi"))
    response = post(client, model_dir, PATH, {"model": "stub", "input": "Hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert client.asks == []
