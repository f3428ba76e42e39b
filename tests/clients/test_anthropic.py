"""The `anthropic` package as it is, with its blocking and its async client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.asking import Asking
from tests.clients.conftest import KEY

KINDS = (anthropic.Anthropic, anthropic.AsyncAnthropic)
ASK: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
GREEDY: Any = {"extra_body": {"temperature": 0}}  # of which its signatures know nothing any more
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(params=KINDS)
def asking(request: pytest.FixtureRequest, address: str) -> Iterator[Asking]:
    yield from _asking(request.param, address)


@pytest.fixture(params=KINDS)
def scripted(request: pytest.FixtureRequest, scripted_address: str) -> Iterator[Asking]:
    yield from _asking(request.param, scripted_address)


def _asking(kind: Any, address: str) -> Iterator[Asking]:
    with Asking(kind(base_url=address, api_key=KEY, max_retries=0)) as made:
        yield made


def test_a_message_its_usage_and_its_stream(asking: Asking) -> None:
    messages = asking.client.messages
    whole = asking.one(messages.create(**ASK, **GREEDY))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert whole.stop_reason == "max_tokens"
    count = asking.one(messages.count_tokens(model="tiny", messages=ASK["messages"]))
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    assert usage.output_tokens == 9
    events, streamed = asking.helped(messages.stream(**ASK, **GREEDY), "get_final_message")
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.output_tokens == 9
    texts = [event.text for event in events if event.type == "text"]
    assert "".join(texts) == whole.content[0].text
    kinds = [event.type for event in asking.all(messages.create(**ASK, stream=True))]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_forced(asking: Asking, choice: Any) -> None:
    fields = {**ASK, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    answer = asking.one(asking.client.messages.create(**fields))
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Rome", "Oslo")


def test_a_call_goes_back_with_its_result(scripted: Asking) -> None:
    messages = scripted.client.messages
    fields = {**ASK, "max_tokens": 200, "tools": [WEATHER], "system": "Be kind."}
    _, answer = scripted.helped(messages.stream(**fields), "get_final_message")
    (call,) = answer.content
    assert (call.name, call.input) == ("weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = scripted.one(messages.create(**{**fields, "messages": turns}))
    assert (last.content[0].type, last.stop_reason) == ("text", "end_turn")


def test_a_stop_sequence_and_errors(scripted: Asking) -> None:
    messages = scripted.client.messages
    fields = {**ASK, "max_tokens": 200}
    answer = scripted.one(messages.create(**fields, stop_sequences=["asked"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "asked")
    with pytest.raises(anthropic.BadRequestError, match="frobnicate"):
        scripted.one(messages.create(**ASK, extra_body={"frobnicate": 1}))
    with pytest.raises(anthropic.NotFoundError):
        scripted.one(messages.create(**{**ASK, "model": "other"}))
