"""The app over a real engine: a model of one layer, whose tokens are bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from photon_ext.serve.app import make_app
from photon_ext.serve.client import EngineClient
from photon_ext.serve.settings import ServeSettings
from tests.serve.http.server import CHAT, COMPLETIONS, HELLO, running
from tests.serve.processes import until

CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(
    model: str, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Asks the app on the loop of its engine."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHATML)
    client = EngineClient.in_process(model, max_rows=4, max_len=256, chunk=64, buckets=(4,))

    async def opened() -> Any:
        await client.connect()
        app = make_app(client, ServeSettings(model, model, ("tiny",), chat_template=str(template)))
        lifespan = running(app)
        await lifespan.__aenter__()
        transport = httpx2.ASGITransport(app=app)
        asking = httpx2.AsyncClient(transport=transport, base_url="http://tiny")
        while (await asking.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        return lifespan, asking

    lifespan, asking = loop.run_until_complete(opened())
    yield asking
    loop.run_until_complete(lifespan.__aexit__(None, None, None))
    loop.run_until_complete(client.close())


def ask(loop: asyncio.AbstractEventLoop, http: Any, path: str, **fields: Any) -> Any:
    response = loop.run_until_complete(http.post(path, json=fields))
    assert response.status_code == 200, response.text
    return response.json()


def test_the_same_seed_gives_the_same_answers(loop: Any, http: Any) -> None:
    fields = {"prompt": "Once", "seed": 2**63 + 5, "n": 3, "max_tokens": 8, "temperature": 1.5}
    first, second = (ask(loop, http, COMPLETIONS, **fields) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len({*texts}) == 3
    assert first["usage"]["completion_tokens"] <= 24


def test_a_schema_is_kept(loop: Any, http: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = ask(loop, http, CHAT, messages=HELLO, response_format=form, max_tokens=40)
    assert type(json.loads(answer["choices"][0]["message"]["content"])["ok"]) is bool
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_prompts_scores_are_those_of_the_answer_that_it_was(loop: Any, http: Any) -> None:
    """What a token's log-probability was when it was sampled, it is in an echoed prompt."""
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    ids = [*b"Once upon"]
    first = ask(loop, http, COMPLETIONS, prompt=ids, echo=True, **fields)
    scored = first["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == len(ids) + 6
    again = ask(loop, http, COMPLETIONS, prompt=ids, **fields)["choices"][0]["logprobs"]
    assert again["token_logprobs"] == scored["token_logprobs"][len(ids) :]
    assert all(value < 0 for value in scored["token_logprobs"][1:])


def test_what_the_engine_alone_can_refuse_is_a_bad_request(loop: Any, http: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
    for wrong in (
        {"regex": "("},
        {"stop_token_ids": [*range(200)]},
        {"grammar": "start: missing"},
        {"response_format": schema},
    ):
        body = {"prompt": "Once", **wrong}
        response = loop.run_until_complete(http.post(COMPLETIONS, json=body))
        assert response.status_code == 400, response.text


def ends(loop: Any, http: Any) -> dict[str, float]:
    """How many requests have ended, by why."""
    text = loop.run_until_complete(http.get("/metrics")).text
    found = re.findall(r'request_success_total{finished_reason="(\w+)",.*} (.*)', text)
    return {reason: float(count) for reason, count in found}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_ends_at_a_stop_string_counts_as_stop(
    loop: Any, http: Any, path: str
) -> None:
    before = ends(loop, http)
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    answer = ask(loop, http, path, **prompt, n=2, regex="a{200}", stop="aaa", max_tokens=200)
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["aaa", "aaa"]
    until(lambda: sum(ends(loop, http).values()) == sum(before.values()) + 2)
    assert ends(loop, http) == {**before, "stop": before["stop"] + 2}


def test_the_openai_client_streams_from_an_engine(loop: Any, http: Any) -> None:
    async def asked() -> Any:
        asking = openai.AsyncOpenAI(base_url="http://tiny/v1", api_key="none", http_client=http)
        fields: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 1}
        text, usage = "", None
        async for chunk in await asking.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        whole = await asking.chat.completions.create(**fields)
        assert whole.choices[0].message.content == text
        return usage

    usage = loop.run_until_complete(asked())
    assert usage.completion_tokens <= 12
    assert usage.prompt_tokens == len("user: Hi\nassistant: ")
