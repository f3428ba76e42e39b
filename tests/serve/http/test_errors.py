"""What is wrong with a request, or the engine, is told in OpenAI's shape, with its status."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from photon_ext.serve.contract import BadAsk, End
from tests.serve.http.server import CHAT, COMPLETIONS, HELLO, post, says, served
from tests.serve.http.stub import StubClient, busy

BODY = {"messages": HELLO}
AS_JSON = {"response_format": {"type": "json_object"}}


def sent(
    model_dir: Path, client: StubClient | None = None, changes: Any = None, **request: Any
) -> httpx2.Response:
    """One request, as httpx takes it."""

    async def asked() -> httpx2.Response:
        async with served(client or StubClient(says("Hi")), model_dir, **(changes or {})) as http:
            return await http.request(**{"method": "POST", "url": CHAT, **request})

    return asyncio.run(asked())


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def test_paths_and_methods_that_are_not_there(model_dir: Path) -> None:
    assert error_of(sent(model_dir, url="/v1/nothing"), 404)["code"] == "unknown_url"
    assert error_of(sent(model_dir, url="/v1/load_lora_adapter"), 404)
    response = sent(model_dir, method="GET")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b'{"messages": NaN}', b"[" * 100_000],
)
def test_a_body_that_is_no_object_of_json(model_dir: Path, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert error_of(sent(model_dir, content=content, headers=headers), 400)


def block_of(kind: str, **fields: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": [{"type": kind, **fields}]}
    return {"model": "stub", "max_tokens": 4, "messages": [turn]}


TEXT = {"type": "text", "text": 5}
RESULT = {"tool_use_id": "a", "content": [TEXT]}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [TEXT]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {**BODY, "stop": ["a", 5]}, "stop[1]"),
        ("/v1/messages", block_of("text", text=5), "messages[0].content[0].text"),
        ("/v1/messages", block_of("text", text="a", x=5), "messages[0].content[0].x"),
        ("/v1/messages", block_of("tool_use", id="a"), "messages[0].content[0].name"),
        (
            "/v1/messages",
            block_of("tool_result", **RESULT),
            "messages[0].content[0].content[0].text",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            "/v1/responses",
            {"input": [{"type": "message", "role": "user", "content": [TEXT]}]},
            "input[0].content[0].text",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": 5, "name": "a", "arguments": ""}]},
            "input[0].call_id",
        ),
    ],
)
def test_the_place_of_a_fault_is_as_clients_write_it(
    model_dir: Path, path: str, body: Any, place: str
) -> None:
    response = sent(model_dir, url=path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{place} is ")
    assert error.get("param", place) == place


def tools_with(number: float) -> Any:
    parameters = {"type": "object", "properties": {"a": {"enum": [0, number]}}}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {**BODY, "tools": tools_with(7)}, "tools[0]"),
        (CHAT, {**BODY, "chat_template_kwargs": {"a": [7]}}, "chat_template_kwargs"),
        ("/tokenize", {**BODY, "chat_template_kwargs": {"a": 7}}, "chat_template_kwargs"),
        (
            COMPLETIONS,
            {
                "prompt": "a",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": [7]}},
                },
            },
            "response_format.json_schema.schema",
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"enum": [7]}}}},
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"a": 7}}]},
            "tools[0].parameters",
        ),
    ],
)
def test_numbers_that_json_does_not_have_are_refused(
    model_dir: Path, path: str, body: Any, field: str, number: str
) -> None:
    """Python's JSON takes them."""
    content = json.dumps(body).replace("7", number)
    error = error_of(sent(model_dir, url=path, content=content.encode()), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: it holds ")
    assert sent(model_dir, url=path, content=json.dumps(body).encode()).status_code != 500


def test_numbers_of_any_length_are_refused(model_dir: Path) -> None:
    headers = {"content-type": "application/json"}
    for field in ("seed", "max_tokens", "priority", "temperature"):
        body = json.dumps(BODY)[:-1] + f', "{field}": {"9" * 5000}}}'
        error = error_of(sent(model_dir, content=body.encode(), headers=headers), 400)
        assert len(error["message"]) < 500


def test_other_content_types_are_refused(model_dir: Path) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = sent(model_dir, content=json.dumps(BODY), headers=form)
    assert error_of(response, 415)["code"] == "unsupported_media_type"
    fine = {"content-type": "application/json; charset=utf-8"}
    assert sent(model_dir, content=json.dumps(BODY), headers=fine).status_code == 200


def test_a_body_has_a_limit(model_dir: Path) -> None:
    small = {"max_body": 1000}
    long = {"messages": [{"role": "user", "content": "x" * 1000}]}
    assert error_of(sent(model_dir, changes=small, json=long), 413)["code"] == "body_too_large"

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    response = sent(model_dir, changes=small, content=pieces(), headers=headers)
    assert error_of(response, 413)
    assert sent(model_dir, changes=small, json=BODY).status_code == 200


def test_a_key_is_asked_for(model_dir: Path) -> None:
    keys = {"api_keys": ("first", "second")}
    for header in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"x-api-key": "firs"},
    ):
        response = sent(model_dir, changes=keys, json=BODY, headers=header)
        assert error_of(response, 401)["code"] == "invalid_api_key"
    for header in ({"authorization": "Bearer second"}, {"x-api-key": "first"}):
        assert sent(model_dir, changes=keys, json=BODY, headers=header).status_code == 200
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert sent(model_dir, changes=keys, method="GET", url=path).status_code == 200
    assert sent(model_dir, changes=keys, method="GET", url="/v1/models").status_code == 401
    assert sent(model_dir, changes=keys, url="/nothing").status_code == 401
    assert sent(model_dir, changes={"api_keys": ("",)}, url="/nothing").status_code == 401


def test_a_model_that_is_not_served(model_dir: Path) -> None:
    response = sent(model_dir, json={**BODY, "model": "gpt-5"})
    assert error_of(response, 404)["code"] == "model_not_found"
    assert sent(model_dir, method="GET", url="/v1/models/gpt-5").status_code == 404


def test_a_full_queue_says_when_to_come_again(model_dir: Path) -> None:
    client = StubClient(says("Hi"), refusal=busy())
    for stream in (False, True):
        response = sent(model_dir, client, json={**BODY, "stream": stream})
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "2"


def test_one_full_queue_cancels_the_other_prompts(model_dir: Path) -> None:
    client = StubClient(says("Hi"), room=2)
    response = post(client, model_dir, COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert error_of(response, 429)
    assert sorted(client.cancelled) == [(0, 0), (1, 0)]


def test_what_the_engine_refuses(model_dir: Path) -> None:
    client = StubClient(says("Hi"), refusal=BadAsk("the regex is too large; make it", "regex"))
    error = error_of(sent(model_dir, client, json=BODY), 400)
    assert (error["param"], error["type"]) == ("regex", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
    ],
)
def test_errors_speak_of_the_fields_of_the_request(model_dir: Path, path: str, field: str) -> None:
    prompt = BODY if path == CHAT else {"prompt": "Once"}
    error = error_of(sent(model_dir, url=path, json={**prompt, "min_tokens": 9, field: 5}), 400)
    assert error["message"].startswith(f"min_tokens is 9 and {field} 5; ")
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, BODY, ("max_tokens", "messages", "tools")),
        (
            CHAT,
            {**BODY, "max_completion_tokens": 5},
            ("max_completion_tokens", "messages", "tools"),
        ),
        (CHAT, {**BODY, **AS_JSON}, ("max_tokens", "messages", "response_format")),
        (COMPLETIONS, {"prompt": "a"}, ("max_tokens", "prompt", "response_format")),
        ("/v1/responses", {"input": "a"}, ("max_output_tokens", "input", "tools")),
    ],
)
def test_what_the_engine_names_otherwise_has_the_name_of_the_request(
    model_dir: Path, path: str, body: Any, names: tuple[str, ...]
) -> None:
    for param, name in zip(("max_new_tokens", "ids", "json_schema"), names, strict=True):
        told = f"a prompt of 3 tokens and max_new_tokens 5 need more; a {param}"
        client = StubClient(says("Hi"), refusal=BadAsk(told, param))
        error = error_of(sent(model_dir, client, url=path, json=body), 400)
        assert "max_new_tokens" not in error["message"]
        assert error["param"] == name


@pytest.mark.parametrize("state", ["starting", "gone"])
def test_an_engine_that_is_not_there(model_dir: Path, state: str) -> None:
    client = StubClient(says("Hi"), state=state)
    response = sent(model_dir, client, json=BODY)
    assert error_of(response, 503)["code"] == f"engine_{state}"
    assert int(response.headers["retry-after"]) >= 1
    for path in ("/health", "/ready"):
        response = sent(model_dir, client, method="GET", url=path)
        assert (response.status_code, response.json()["status"]) == (503, state)


def test_an_engine_that_goes_before_the_answer_is_whole(model_dir: Path) -> None:
    client = StubClient(says("Hello", fails_after=3))
    assert error_of(sent(model_dir, client, json=BODY), 503)["code"] == "engine_gone"
    assert client.running == 0


def test_an_answer_that_fails(model_dir: Path) -> None:
    client = StubClient(says("Hel", End("error", None, "no token is allowed"), stops=False))
    error = error_of(sent(model_dir, client, json=BODY), 503)
    assert error["message"] == "no token is allowed"


def test_a_fault_of_the_server_is_told_without_its_words(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = StubClient(says("Hi"), refusal=KeyError("secret"))
    for stream in (False, True):
        error = error_of(sent(model_dir, client, json={**BODY, "stream": stream}), 500)
        assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_errors_do_not_name_files_of_the_server(model_dir: Path) -> None:
    body = {**BODY, "chat_template_kwargs": {"nonsense": 1}}
    assert str(model_dir) not in error_of(sent(model_dir, json=body), 400)["message"]


def test_adapters_are_loaded_from_one_folder(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "bard").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    client, url = StubClient(says("Hi")), "/v1/load_lora_adapter"
    changes = {"lora_dir": str(tmp_path / "adapters")}
    for wrong in ("../elsewhere", str(tmp_path / "elsewhere"), ".", "..", "missing", ""):
        body = {"lora_name": "x", "lora_path": wrong}
        assert error_of(sent(model_dir, client, changes, url=url, json=body), 400)
    body = {"lora_name": "bard"}
    assert sent(model_dir, client, changes, url=url, json=body).json()["status"] == "loaded"
    assert "bard" in client.card.adapters
    url = "/v1/unload_lora_adapter"
    assert sent(model_dir, client, changes, url=url, json=body).json()["status"] == "unloaded"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (CHAT, b'{"messages": [' + b"{}, " * 2**20 + b"{}]}"),
        (CHAT, b'{"messages": [{"role": "user", "content": [' + b"{}, " * 2**20 + b"{}]}]}"),
        (COMPLETIONS, b'{"prompt": "a", "stop": [' + b"1, " * 2**20 + b"1]}"),
        ("/detokenize", b'{"tokens": [' + b'"", ' * 2**20 + b'""]}'),
        ("/v1/messages", b'{"messages": [' + b"{}, " * 2**20 + b"{}]}"),
        ("/v1/responses", b'{"input": [' + b"{}, " * 2**20 + b"{}]}"),
        (COMPLETIONS, b'{"prompt": [' + b"[1], " * 2**20 + b"[1]]}"),
        (COMPLETIONS, b'{"prompt": [' + b"1, " * (2**21 + 1) + b"1]}"),
        (COMPLETIONS, b'{"prompt": [' + b"[1], " * (2**18 - 9) + b"[1]]}"),
        (COMPLETIONS, b'{"a": 1, ' + b",".join(b'"%d": 1' % i for i in range(2**19)) + b"}"),
    ],
)
def test_a_body_of_very_many_faults_does_not_hold_up_other_clients(
    model_dir: Path, path: str, content: bytes
) -> None:
    """To find and list all of them takes ten seconds and more, in which nobody else is served."""
    sent(model_dir, url="/version", method="GET")  # the app is made
    began = time.process_time()
    response = sent(model_dir, url=path, content=content)
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert time.process_time() - began < 4.0  # half a second at most


def test_no_list_of_a_request_is_without_bound(model_dir: Path) -> None:
    schemas = sent(model_dir, url="/openapi.json", method="GET").json()["components"]["schemas"]
    asked = {name: each for name, each in schemas.items() if name.endswith("Request")}
    assert asked
    for name, schema in asked.items():
        for field, told in schema["properties"].items():
            for each in [told, *told.get("anyOf", ())]:
                if each.get("type") == "array" and field != "prompt":
                    assert "maxItems" in each, (name, field)
