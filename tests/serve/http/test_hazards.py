"""How servers' streams have broken in the field (tests/HAZARDS.md, group A)."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.sampling import SamplingParams
from photon_ext.serve.contract import Delta, End
from photon_ext.serve.http.answer import Answer, AnswerRules
from tests.serve.http.server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    each_says,
    events_of,
    post,
    says,
    served,
    text_of_events,
)
from tests.serve.http.stub import Script, StubClient
from tests.serve.http.words import ids_of

FAMILY = "👨‍👩‍👧 né 日本語"


def told(model_dir: Path, path: str, client: StubClient, **fields: Any) -> list[dict[str, Any]]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    return events_of(post(client, model_dir, path, {**prompt, "stream": True, **fields}))


def test_hazard_a1_characters_are_whole_wherever_tokens_are_cut(model_dir: Path) -> None:
    tokens = ids_of(FAMILY)
    for cut in range(1, len(tokens)):
        client = StubClient(says(FAMILY, cuts=(cut, len(tokens))))
        assert text_of_events(told(model_dir, CHAT, client)) == FAMILY


def test_hazard_a1_an_answer_that_ends_inside_a_character_shows_so(model_dir: Path) -> None:
    tokens = ids_of("é日")
    for count in range(1, len(tokens) + 1):
        events = told(model_dir, CHAT, StubClient(Script(lambda *_: tokens)), max_tokens=count)
        whole = bytes("é日", "utf-8")[:count].decode(errors="replace")
        assert text_of_events(events).rstrip("\ufffd") == whole.rstrip("\ufffd")
        assert ("\ufffd" in text_of_events(events)) == ("\ufffd" in whole)


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 7), (100,)])
def test_hazard_a2_no_part_of_a_stop_string_is_shown_and_nothing_else_held(
    model_dir: Path, cuts: tuple[int, ...]
) -> None:
    for text, shown in (
        ("one STOP two", "one "),
        ("one STO", "one STO"),
        ("one STOSTOP", "one STO"),
        ("one ST OP", "one ST OP"),
        ("STOP", ""),
        ("S", "S"),
    ):
        client = StubClient(says(text, cuts=cuts))
        events = told(model_dir, CHAT, client, stop=["STOP", "never"])
        assert text_of_events(events) == shown
        capped = StubClient(says(text, cuts=cuts, stops=False))
        assert text_of_events(told(model_dir, CHAT, capped, stop="STOP")) == shown


def test_hazard_a2_a_stop_string_is_cut_in_completions(model_dir: Path) -> None:
    client = StubClient(says("a\n\nb"))
    answer = post(client, model_dir, COMPLETIONS, {"prompt": "x", "stop": ["\n\n"]}).json()
    assert answer["choices"][0]["text"] == "a"


def test_hazard_a3_the_first_space_is_there_once() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    words = {"▁Hello": 0, "▁": 1, "▁you": 2, "!": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    strip = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    tokenizer = Tokenizer(backend, {}, None, "words")
    for ids in ([0, 2, 3], [1, 0, 2], [2, 1, 1, 2], [3, 2]):
        answer = Answer(tokenizer.detokenizer(), AnswerRules())
        deltas = [Delta(0, [token]) for token in ids]
        pieces = [piece.text for delta in deltas for piece in answer.take(delta)]
        pieces += [piece.text for piece in answer.take(Delta(0, [], end=End("length")))]
        assert "".join(pieces) == tokenizer.decode(ids)


def test_hazard_a7_each_of_several_answers_has_one_reason_of_its_own(model_dir: Path) -> None:
    texts = "a", "bbbb", "cccccccc"
    for path in (CHAT, COMPLETIONS):
        events = told(model_dir, path, StubClient(each_says(*texts)), n=3, max_tokens=6)
        choices = [event["choices"][0] for event in events]
        ends = [(each["index"], each["finish_reason"]) for each in choices]
        assert [end for end in ends if end[1]] == [(0, "stop"), (1, "stop"), (2, "length")]
        last = {each["index"]: each["finish_reason"] for each in choices}
        assert last == {0: "stop", 1: "stop", 2: "length"}
    body = {"messages": HELLO, "n": 3, "max_tokens": 6}
    answer = post(StubClient(each_says(*texts)), model_dir, CHAT, body).json()
    assert [each["finish_reason"] for each in answer["choices"]] == ["stop", "stop", "length"]
    assert [each["message"]["content"] for each in answer["choices"]] == ["a", "bbbb", "cccccc"]
    assert answer["usage"]["completion_tokens"] == 2 + 5 + 6


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_hazard_a8_usage_comes_where_it_is_asked_for_and_is_exact(
    model_dir: Path, path: str
) -> None:
    for asked in (None, False):
        events = told(
            model_dir, path, StubClient(says("Hi")), stream_options={"include_usage": asked}
        )
        assert all("usage" not in event and event["choices"] for event in events)
    events = told(model_dir, path, StubClient(says("Hi!")), stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert {*events[-1]} == {*events[0]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("failure", ["gone", "error", "cancelled"])
def test_hazard_a9_an_error_inside_a_stream_is_an_event_and_the_stream_ends(
    model_dir: Path, path: str, failure: str
) -> None:
    if failure == "gone":
        client = StubClient(says("Hello", fails_after=3))
    else:
        client = StubClient(says("Hel", End(failure, None, "a fault"), stops=False))
    events = told(model_dir, path, client)
    assert {*events[-1]} == {"error"}
    assert events[-1]["error"]["message"]
    assert not any(each.get("finish_reason") for one in events[:-1] for each in one["choices"])
    assert client.running == 0


def test_hazard_a9_what_is_wrong_with_a_request_is_told_before_a_stream_begins(
    model_dir: Path,
) -> None:
    for path in (CHAT, COMPLETIONS):
        response = post(StubClient(says("x")), model_dir, path, {"stream": True, "n": 0})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_hazard_a13_log_probabilities_that_json_does_not_know(
    model_dir: Path, path: str, stream: bool
) -> None:
    for value in (-math.inf, math.nan, -1e30):
        client = StubClient(says("Hi", logprob=value))
        top: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
        body = top | {"messages": HELLO} if path == CHAT else {"prompt": "a", "logprobs": 20}
        response = post(client, model_dir, path, {**body, "stream": stream})
        assert response.status_code == 200
        assert "-9999.0" in response.text
        assert "NaN" not in response.text
        assert "Infinity" not in response.text


@pytest.mark.parametrize("value", [-(2**64), 2**64, 2**63, 10**300, -1, 299, 300, 2**31, 0.5, True])
def test_hazard_a14_numbers_out_of_range_never_reach_the_engine(
    model_dir: Path, value: Any
) -> None:
    fields: list[dict[str, Any]] = [
        {"seed": value},
        {"stop_token_ids": [value]},
        {"logit_bias": {str(value): 1}},
        {"max_tokens": value},
        {"top_k": value},
        {"n": value},
        {"min_tokens": value},
        {"priority": value},
        {"top_logprobs": value, "logprobs": True},
    ]
    for given in fields:
        client = StubClient(says("Hi"))
        status = post(client, model_dir, CHAT, {"messages": HELLO, **given}).status_code
        assert status in (200, 400)
        if status == 200:
            (ask,) = client.asks
            SamplingParams(**ask.params)
            assert all(0 <= each < 300 for each in ask.params.get("stop_token_ids", ()))
            assert all(0 <= each < 300 for each in ask.params.get("logit_bias", ()))
            assert ask.n <= 128


def test_hazard_a15_ends_of_lines_of_unicode_do_not_end_events(model_dir: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\re\nf\u000bg"
    for path in (CHAT, COMPLETIONS):
        prompt = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
        body = {**prompt, "stream": True, "max_tokens": 50}
        response = post(StubClient(says(text)), model_dir, path, body)
        assert all(each in ("", *response.text.split("\n")) for each in response.text.splitlines())
        assert response.text.isascii()
    assert text_of_events(told(model_dir, CHAT, StubClient(says(text)))) == text


def test_hazard_a15_odd_request_ids_do_not_come_back(model_dir: Path) -> None:
    async def ids(*given: bytes) -> list[str]:
        async with served(StubClient(says("Hi")), model_dir) as http:
            sent = [
                await http.post(CHAT, json={"messages": HELLO}, headers=[(b"x-request-id", each)])
                for each in given
            ]
            assert all(response.status_code == 200 for response in sent)
            return [response.headers["x-request-id"] for response in sent]

    odd = ["ü".encode(), "\u4e16".encode(), b"a b", b"x" * 200, b"\xff"]
    assert all(each.startswith("req_") for each in asyncio.run(ids(*odd)))
    assert asyncio.run(ids(b"fine-1")) == ["fine-1"]


def test_tokens_that_wait_are_events_of_one_message(model_dir: Path) -> None:
    """And each has an event of its own, by which clients count."""

    async def bodies() -> list[bytes]:
        client = StubClient(says("abcdefgh", cuts=(8, 1)))
        content = json.dumps({"messages": HELLO, "stream": True}).encode()
        messages = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[bytes] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "state": {}}
        scope |= {"query_string": b"", "root_path": ""}
        async with served(client, model_dir) as http:
            await http._transport.app(scope, receive, send)
        return [body for body in sent if body]

    first, second, done = asyncio.run(bodies())
    assert first.count(b"data: ") == 1 + 8
    assert second.count(b"data: ") == 1
    assert done == b"data: [DONE]\n\n"
