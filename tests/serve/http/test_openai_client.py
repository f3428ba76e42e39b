"""The `openai` package, as it is, against the app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.serve.http.server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    each_says,
    events_of,
    post,
    says,
)
from tests.serve.http.stub import StubClient, busy


@pytest.fixture
def client(address: str, engine: StubClient) -> Iterator[openai.OpenAI]:
    engine.script, engine.refusal = says("Hello!", cached=4), None
    engine.asks.clear()
    with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI, engine: StubClient) -> None:
    answer = client.chat.completions.create(
        model="stub", messages=HELLO, seed=2**63 - 1, temperature=0, max_completion_tokens=20
    )
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert engine.asks[0].params["seed"] == 2**63 - 1


def test_chat_that_is_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="stub", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "Hello!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="stub", messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") == 1 + 6  # the role comes with an empty text
    assert final.choices[0].message.content == "Hello!"


def test_several_answers_with_log_probabilities(client: openai.OpenAI, engine: StubClient) -> None:
    engine.script = each_says("ab", "c")
    answer = client.chat.completions.create(
        model="stub", messages=HELLO, n=2, logprobs=True, top_logprobs=3
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["ab", "c"]
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [each.token for each in choice.logprobs.content] == [*text]
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="stub", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*"aHel"]
    stream = client.completions.create(model="stub", prompt="a", stream=True)
    assert "".join(each.choices[0].text for each in stream) == "Hello!"


def test_models(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["stub", "alias", "poet"]
    assert client.models.retrieve("poet").owned_by == "photon_ext"


def test_errors_are_the_clients_own(
    client: openai.OpenAI, engine: StubClient, address: str
) -> None:
    def ask(**fields: object) -> None:
        client.chat.completions.create(
            model="stub",
            messages=HELLO,
            extra_body=fields,
        )

    with pytest.raises(openai.BadRequestError) as wrong:
        ask(frobnicate=1)
    assert (wrong.value.param, wrong.value.code) == ("frobnicate", "unknown_parameter")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    engine.refusal = busy()
    with pytest.raises(openai.RateLimitError):
        ask()
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="no").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="stub", input="x")


def test_an_error_inside_a_stream_is_raised(client: openai.OpenAI, engine: StubClient) -> None:
    engine.script = says("Hello", fails_after=2)
    stream = client.chat.completions.create(model="stub", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="ended"):
        list(stream)


def test_many_at_once(client: openai.OpenAI, address: str) -> None:
    async def ask(asking: openai.AsyncOpenAI, streamed: bool) -> str | None:
        if not streamed:
            answer = await asking.chat.completions.create(model="stub", messages=HELLO)
            return answer.choices[0].message.content
        text = ""
        async for chunk in await asking.chat.completions.create(
            model="stub", messages=HELLO, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        return text

    async def asked() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="key") as asking:
            return await asyncio.gather(*(ask(asking, i % 2 == 0) for i in range(40)))

    assert asyncio.run(asked()) == ["Hello!"] * 40


@pytest.mark.parametrize("tools", [False, True])
def test_answers_are_valid_by_the_clients_own_types(model_dir: Path, tools: bool) -> None:
    """The client takes what it gets without a check; its types are made of OpenAI's document."""
    call = '<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine = StubClient(says(call if tools else "Hi"))
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2}
    if tools:
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "stub", "messages": HELLO, **fields}
    ChatCompletion.model_validate_json(post(engine, model_dir, CHAT, body).text, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for event in events_of(post(engine, model_dir, CHAT, body | options)):
        ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
    prompt = {"prompt": ["a", "b"], "logprobs": 2}  # echo has null for a first token, as theirs
    text = post(engine, model_dir, COMPLETIONS, prompt).text
    Completion.model_validate_json(text, strict=True)
    asked: dict[str, Any] = {"input": "Hi"}
    if tools:
        asked["tools"] = [{"type": "function", "name": "f", "parameters": {}, "strict": True}]
    Response.model_validate_json(post(engine, model_dir, "/v1/responses", asked).text, strict=True)
