"""The `openai` package as it is, of the newest version and of 1.x, with its blocking and its async
client. Answers of a random model tell nothing, but they are counted, scored, repeated by a seed and
bound by forms; the scripted model calls tools when it likes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.asking import Asking
from tests.clients.conftest import KEY

HELLO: Any = [{"role": "user", "content": "Hi"}]
PROMPT_TOKENS = 21  # of HELLO, by the chat template
ASK: Any = {"model": "tiny", "messages": HELLO}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=-50, le=50)
    rain: bool


KINDS = (openai.OpenAI, openai.AsyncOpenAI)


@pytest.fixture(params=KINDS)
def asking(request: pytest.FixtureRequest, address: str) -> Iterator[Asking]:
    yield from _asking(request.param, address)


@pytest.fixture(params=KINDS)
def scripted(request: pytest.FixtureRequest, scripted_address: str) -> Iterator[Asking]:
    yield from _asking(request.param, scripted_address)


def _asking(kind: Any, address: str) -> Iterator[Asking]:
    with Asking(kind(base_url=f"{address}/v1", api_key=KEY, max_retries=0)) as made:
        yield made


def test_chat_and_its_usage(asking: Asking) -> None:
    chat = asking.client.chat.completions
    answer = asking.one(chat.create(**ASK, max_completion_tokens=9, logprobs=True, seed=1))
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, 9)
    assert usage.total_tokens == PROMPT_TOKENS + 9
    assert usage.prompt_tokens_details.cached_tokens in (0, 16)
    assert len(choice.logprobs.content) == 9


def test_a_seed_repeats_an_answer_and_n_goes_on_from_it(asking: Asking) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = asking.one(
            asking.client.chat.completions.create(**ASK, max_tokens=30, temperature=1, **fields)
        )
        return [choice.message.content for choice in answer.choices]

    first, second, third = texts(n=3, seed=2**63)
    assert len({first, second, third}) == 3
    assert texts(seed=2**63) == [first]
    assert texts(seed=2**63 + 2) == [third]


def test_a_stream_is_the_same_answer_with_its_usage(asking: Asking) -> None:
    fields = {**ASK, "max_tokens": 30, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}
    create = asking.client.chat.completions.create
    whole = asking.one(create(**fields))
    *chunks, last = asking.all(
        create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert (last.choices, last.usage) == ([], whole.usage)
    for index, choice in enumerate(whole.choices):
        own = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert [each.finish_reason for each in own if each.finish_reason] == [choice.finish_reason]
        scored = [entry for each in own if each.logprobs for entry in each.logprobs.content]
        assert scored == choice.logprobs.content
    assert not any(chunk.usage for chunk in chunks)


def test_the_likeliest_tokens_have_the_highest_log_probabilities(asking: Asking) -> None:
    answer = asking.one(
        asking.client.chat.completions.create(
            **ASK, max_tokens=12, temperature=0, logprobs=True, top_logprobs=5
        )
    )
    for entry in answer.choices[0].logprobs.content:
        values = [each.logprob for each in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]


def test_completions_of_texts_and_of_token_ids(asking: Asking) -> None:
    create = asking.client.completions.create
    fields = {"model": "tiny", "max_tokens": 6, "seed": 3, "logprobs": 2, "echo": True, "n": 2}
    answer = asking.one(create(**fields, prompt=["abc", "de"]))
    assert [choice.text[:3] for choice in answer.choices[:2]] == ["abc", "abc"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    for choice in answer.choices:
        columns = choice.logprobs
        assert columns.token_logprobs[0] is None
        prompt = 3 if choice.index < 2 else 2
        assert len(columns.tokens) == len(columns.token_logprobs) == prompt + 6
        assert "".join(columns.tokens[:prompt]) == choice.text[:prompt]
    letter = ord("a") - 33  # its rank among the letters of bytes
    ids = [[letter, letter + 1, letter + 2], [letter + 3, letter + 4]]
    by_ids = asking.one(create(**fields, prompt=ids))
    assert by_ids.choices == answer.choices
    scored = asking.one(
        create(model="tiny", prompt="abc", max_tokens=0, logprobs=0, echo=True)
    ).choices[0]
    expected = answer.choices[0].logprobs.token_logprobs[:3]
    assert scored.text == "abc"
    assert scored.logprobs.token_logprobs == [None, *map(pytest.approx, expected[1:])]


def test_a_completion_that_is_streamed(asking: Asking) -> None:
    create = asking.client.completions.create
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 20, "seed": 4}
    whole = asking.one(create(**fields))
    *chunks, last = asking.all(
        create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage == whole.usage


def test_an_answer_is_parsed_and_goes_back(asking: Asking) -> None:
    chat, responses = asking.client.chat.completions, asking.client.responses
    turns = HELLO
    for seed in range(3):
        asked = {"model": "tiny", "messages": turns, "response_format": Weather}
        (choice,) = asking.one(chat.parse(**asked, seed=seed)).choices
        assert isinstance(choice.message.parsed, Weather)
        assert choice.finish_reason == "stop"
        turns = [*turns, choice.message, *HELLO]
    _, final = asking.helped(chat.stream(**ASK, response_format=Weather), "get_final_completion")
    assert isinstance(final.choices[0].message.parsed, Weather)
    response = asking.one(responses.parse(model="tiny", input="Hi", text_format=Weather))
    assert isinstance(response.output_parsed, Weather)
    turns = [*HELLO, *response.output, *HELLO]
    assert asking.one(responses.create(model="tiny", input=turns, max_output_tokens=2)).output
    _, final = asking.helped(
        responses.stream(model="tiny", input="Hi", text_format=Weather), "get_final_response"
    )
    assert isinstance(final.output_parsed, Weather)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Weather"}}]
)
def test_a_call_that_is_forced(asking: Asking, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    answer = asking.one(
        asking.client.chat.completions.parse(**ASK, tools=tools, tool_choice=choice)
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_the_models_own(scripted: Asking) -> None:
    chat = scripted.client.chat.completions
    asked = {**ASK, "tools": [openai.pydantic_function_tool(Weather)]}
    events, final = scripted.helped(chat.stream(**asked), "get_final_completion")
    pieces = [each for each in events if each.type == "tool_calls.function.arguments.delta"]
    (call,) = final.choices[0].message.tool_calls
    assert len(pieces) > 1
    assert "".join(each.arguments_delta for each in pieces) == call.function.arguments
    assert call.function.parsed_arguments == Weather(city="Rome", degrees=1, rain=True)
    assert final.choices[0].finish_reason == "tool_calls"
    turns = [
        *HELLO,
        final.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    answer = scripted.one(chat.create(**{**asked, "messages": turns}))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content


def test_responses_and_their_usage(asking: Asking) -> None:
    create = asking.client.responses.create
    fields = {"model": "tiny", "input": "Hi", "max_output_tokens": 9, "temperature": 0}
    whole = asking.one(create(**fields))
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (PROMPT_TOKENS, 9)
    events = asking.all(create(**fields, stream=True))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert events[-1].response.output_text == whole.output_text


def test_a_call_in_a_response_goes_back_with_its_result(scripted: Asking) -> None:
    create = scripted.client.responses.create
    tool = openai.pydantic_function_tool(Weather)["function"]
    asked: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", **tool}]}
    response = scripted.one(create(**asked, input="Hi"))
    (call,) = response.output
    assert (call.type, json.loads(call.arguments)["city"]) == ("function_call", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns = [*HELLO, *response.output, output]
    assert scripted.one(create(**asked, input=turns)).output_text


def test_many_at_once(address: str) -> None:
    async def asked() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY) as client:

            async def tokens(count: int) -> int:
                answer = await client.chat.completions.create(
                    **ASK, max_tokens=count, extra_body={"ignore_eos": True}
                )
                assert answer.usage is not None
                return answer.usage.completion_tokens

            return await asyncio.gather(*map(tokens, range(1, 41)))

    assert asyncio.run(asked()) == [*range(1, 41)]


def test_models_and_errors(asking: Asking, address: str) -> None:
    client = asking.client
    assert [each.id for each in asking.all(client.models.list())] == ["tiny", "alias"]
    with pytest.raises(openai.BadRequestError) as wrong:
        asking.one(client.chat.completions.create(**ASK, extra_body={"frobnicate": 1}))
    assert wrong.value.param == "frobnicate"
    with pytest.raises(openai.NotFoundError):
        asking.one(client.chat.completions.create(model="other", messages=HELLO))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="no").models.list()
    with pytest.raises(openai.BadRequestError, match="store"):
        asking.one(client.responses.create(model="tiny", input="Hi", store=True))
