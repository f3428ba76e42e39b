"""What a client of `photon-ext bench` makes of what a server sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from photon_ext.bench.asks import Ask, Endpoint
from photon_ext.bench.connection import Answer, Connection
from tests.bench.server import (
    END,
    OK,
    Reply,
    chunk,
    event,
    refused,
    serving,
    streamed,
    text_event,
    usage,
)

ASK = Ask([1, 2, 3], 4)


def asked(
    reply: Callable[[dict[str, Any]], Reply | None],
    *asks: Ask,
    timeout_s: float = 60.0,
    **more: Any,
) -> tuple[list[Answer], bool]:
    """The answers of one connection, and whether it is usable behind them."""

    async def ask_all(url: str) -> tuple[list[Answer], bool]:
        connection = Connection(Endpoint(url, "m", **more), timeout_s)
        found = [await connection.ask(one, 0.0) for one in asks or (ASK,)]
        usable = connection.usable
        connection.close()
        return found, usable

    with serving(reply) as url:
        return asyncio.run(ask_all(url))


def test_tokens_are_those_of_the_usage_and_times_those_of_events_with_text() -> None:
    words = [text_event(word) for word in ("a", "b", "c")]
    found, usable = asked(lambda body: streamed(*words, tokens=4), ASK, ASK)
    for answer in found:
        assert (answer.error, answer.tokens, answer.prompt_tokens) == (None, 4, 7)
        assert len(answer.times) == 3
        assert answer.sent <= answer.times[0] <= answer.times[-1] <= answer.ended
    assert usable


def test_what_only_informs_is_no_answer() -> None:
    informs = b"HTTP/1.1 100 Continue\r\n\r\n"
    (answer,), usable = asked(lambda body: [informs, *streamed(text_event("a"), tokens=1)])
    assert (answer.error, answer.tokens, usable) == (None, 1, True)


def test_what_is_asked() -> None:
    bodies = []

    def reply(body: dict[str, Any]) -> Reply:
        bodies.append(body)
        return streamed(text_event("a"), tokens=1)

    asked(reply)
    asked(reply, Ask("some words", 4), chat=True, exact=False)
    completion, chat = bodies
    assert completion["prompt"] == [1, 2, 3]
    assert completion["min_tokens"] == completion["max_tokens"] == 4
    assert completion["ignore_eos"]
    assert chat["messages"] == [{"role": "user", "content": "some words"}]
    assert not {"ignore_eos", "min_tokens", "prompt"} & {*chat}
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)


def test_events_may_be_cut_anywhere_or_come_together() -> None:
    told = "".join(map(text_event, ('"error"', '"completion_tokens"', "data: x\\n\\n", "é")))
    told = (": ping\n\n" + told + usage(9) + event("[DONE]")).replace("\n", "\r\n")
    for size in (1, 7, 10_000):
        raw = told.encode()
        parts = [raw[at : at + size] for at in range(0, len(raw), size)]
        chunks = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts]
        (answer,), _ = asked(lambda body, chunks=chunks: [OK, *chunks, END])
        assert (answer.error, answer.tokens, len(answer.times)) == (None, 9, 4)


def test_the_first_token_of_a_chat_is_its_first_text() -> None:
    def delta(**of: Any) -> str:
        return event({"choices": [{"index": 0, "delta": of}]})

    events = delta(role="assistant", content=""), delta(reasoning_content="h"), delta(content="i")
    (answer,), _ = asked(lambda body: streamed(*events, tokens=2), chat=True)
    assert len(answer.times) == 2


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (refused("429 Too Many", json.dumps({"error": {"message": "full"}})), "429: full"),
        (refused("500 Oops", "<html>"), "500: <html>"),
        (refused("200 OK", ""), "the stream ended without [DONE]"),
        ([OK, chunk(text_event("a"))[:-4], None], "the connection was closed before the end"),
        ([b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"], "101: "),
        ([b"SSH-2.0\r\n\r\n"], "this is no HTTP"),
        (
            [OK, chunk(text_event("a") + event({"error": {"message": "gone"}}))],
            "in the stream: gone",
        ),
        ([OK, chunk(event({"choices": "abc"}))], "the server sends events of another shape"),
        ([OK, chunk(event([1]))], "the server sends events of another shape"),
        ([OK, chunk(event("{no"))], "the server sends events of another shape: {no"),
        ([OK, chunk(event({"usage": {"completion_tokens": "5"}}))], "the server sends events of"),
        ([OK, chunk("data: " + "x" * (1 << 20))], "an event in the stream has more than"),
        ([OK, chunk(text_event("a")), 5.0], "no whole answer within 0.2 s"),
    ],
)
def test_a_failure_says_why(reply: Reply, why: str) -> None:
    (answer,), usable = asked(lambda body: reply, timeout_s=0.2 if "0.2 s" in why else 60.0)
    assert answer.error is not None
    assert answer.error.startswith(why)
    assert not usable


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    told = event({"choices": None}) + text_event("a") + event("[DONE]")
    (answer,), usable = asked(lambda body: [head, told.encode(), None])
    assert (answer.error, answer.tokens, len(answer.times)) == (None, None, 1)
    assert not usable


def test_a_server_that_is_not_there() -> None:
    with serving(lambda body: []) as url:
        pass
    answer = asyncio.run(Connection(Endpoint(url, "m"), 60.0).ask(ASK, 0.0))
    assert answer.error is not None
    assert answer.error.startswith("cannot connect")
