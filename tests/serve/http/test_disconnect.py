"""Clients that leave, that do not read, or that come again: over a socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serve.http.server import CHAT, HELLO, on_a_port, says
from tests.serve.http.stub import CARD, StubClient
from tests.serve.processes import until


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def request(body: Any, path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("stream", [False, True])
def test_hazard_a10_a_client_that_leaves_frees_its_row(model_dir: Path, stream: bool) -> None:
    client = StubClient(says("x" * 100, waits_after=3))
    with on_a_port(client, model_dir) as address:
        connection = connect(address)
        connection.sendall(request({"messages": HELLO, "stream": stream, "n": 2}))
        until(lambda: client.running == 1)
        if stream:
            connection.recv(100)
        assert client.cancelled == []
        connection.close()
        until(lambda: client.running == 0)
        assert sorted(client.cancelled) == [(0, 0), (0, 1)]


def test_hazard_a10_a_client_that_leaves_within_its_body_asks_nothing(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    with on_a_port(client, model_dir) as address:
        connection = connect(address)
        connection.sendall(request({"messages": HELLO})[:-5])
        connection.close()
        assert httpx2.get(f"{address}/health", timeout=60).status_code == 200
        assert client.asks == []


def resting(value: Callable[[], int]) -> Callable[[], bool]:
    """Whether it has not changed for half a second, while somebody asks."""
    last = value(), time.monotonic()

    def rests() -> bool:
        nonlocal last
        if value() != last[0]:
            last = value(), time.monotonic()
        return time.monotonic() - last[1] > 0.5

    return rests


def test_hazard_a11_a_reader_that_stalls_holds_a_bounded_buffer(model_dir: Path) -> None:
    """Its answer goes on, but nothing is taken from the engine before the socket takes more."""
    length = 100_000  # more events than the buffers of both sockets take
    card = replace(CARD, max_len=2 * length)
    client = StubClient(says("x" * length, stops=False), card)
    with on_a_port(client, model_dir) as address:
        stalled = connect(address)
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(request({"messages": HELLO, "stream": True}))
        until(lambda: client.running == 1)
        until(resting(lambda: client.given))
        assert client.running == 1
        assert client.given < length
        assert httpx2.get(f"{address}/health", timeout=60).status_code == 200
        stalled.close()
        until(lambda: client.running == 0)


def test_hazard_a12_a_connection_is_used_again_and_for_requests_in_line(model_dir: Path) -> None:
    client = StubClient(says("Hi"))
    with on_a_port(client, model_dir) as address, connect(address) as connection:
        connection.sendall(request({"messages": HELLO}) * 2)
        found = b""
        while found.count(b'"finish_reason":"stop"') < 2 or not found.endswith(b"}"):
            found += connection.recv(65536)
        time.sleep(0.2)
        connection.sendall(request({"messages": HELLO}))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert len(client.asks) == 3


def test_a_client_that_leaves_with_requests_in_line_frees_the_row_of_the_first(
    model_dir: Path,
) -> None:
    client = StubClient(says("x" * 100, waits_after=3))
    with on_a_port(client, model_dir) as address, connect(address) as connection:
        connection.sendall(request({"messages": HELLO, "stream": True}) * 3)
        connection.recv(100)
        connection.close()
        until(lambda: client.running == 0)
        assert len(client.asks) == 1


@pytest.mark.parametrize("body", [b"", b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"])
def test_what_is_no_http_is_refused_behind_the_answers_before_it(
    model_dir: Path, body: bytes
) -> None:
    with on_a_port(StubClient(says("Hi")), model_dir) as address, connect(address) as connection:
        connection.sendall(request({"messages": HELLO}) * 2 + body + b"\0\r\n\r\n")
        found = b"".join(iter(lambda: connection.recv(65536), b""))
        assert found.count(b'"finish_reason":"stop"') == 2
        assert found.count(b"HTTP/1.1 ") == 3
        assert b"HTTP/1.1 400 " in found


def test_hazard_a16_a_client_whose_time_is_over_is_gone_before_it_comes_again(
    model_dir: Path,
) -> None:
    import openai

    client = StubClient(says("Hello", waits_after=2))
    with on_a_port(client, model_dir) as address:
        asking = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=1.5, max_retries=1)
        with pytest.raises(openai.APITimeoutError):
            asking.chat.completions.create(model="stub", messages=HELLO)
        until(lambda: client.running == 0)
        assert len(client.asks) == 2
        assert client.most_running == 1
        assert client.cancelled == [(0, 0), (1, 0)]
