"""A server's processes: one request's walk, and what dies alone."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.serve.processes import (
    Server,
    Stream,
    end_of,
    is_alive,
    kill,
    stopped,
    tokens_of,
    until,
)

FORM: dict[str, Any] = {"choice": ["yes", "no"], "max_new_tokens": 10}


def test_a_request_walks_through_all_processes(server: Server) -> None:
    told = server.generated(ids=[1, 2, 3], params={"max_new_tokens": 20, "ignore_eos": True}, n=3)
    assert [len(tokens_of(told, index)) for index in range(3)] == [20, 20, 20]
    assert tokens_of(told, 0) == tokens_of(told, 1) == tokens_of(told, 2)  # greedy
    assert end_of(told) == ["length", "max_new_tokens", None]
    assert server.is_empty()


def test_parent_and_http_processes_have_no_torch(server: Server) -> None:
    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert not has_torch(server.process.pid)
    assert not any(map(has_torch, server.children("http_process")))
    assert all(map(has_torch, server.children("engine_process")))


def test_what_is_wrong_is_told_before_a_response_begins(server: Server) -> None:
    response = server.post(ids=[1], params={"temperature": -1})
    assert response.status == 400
    assert b'"temperature"' in response.read()


def test_forms_are_compiled_in_a_process_of_their_own(server: Server) -> None:
    """An automaton, a form that the host keeps, and one that is refused."""
    for params in (FORM, {"grammar": 'root ::= "a" | "(" root ")"', "max_new_tokens": 10}):
        told = server.generated(ids=[1], params=params)
        assert end_of(told)[0] in ("stop", "length")
    text = bytes(_byte_of(token) for token in tokens_of(server.generated(ids=[1], params=FORM)))
    assert text in (b"yes", b"no")
    assert server.post(ids=[1], params={"regex": "("}).status == 400
    until(server.is_empty)


def _byte_of(token: int) -> int:
    """Of a token of tiny.py: its rank in the alphabet of byte-level tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    return ord(backend.decode([token]))


def of_both(server: Server, n: int = 1) -> tuple[Stream, Stream]:
    """Streams of both HTTP processes, the first with `n` answers: while one is stopped the other
    accepts. Neither is asked for anything before both run: who is stopped for long is cut off.
    """
    first, second = server.children("http_process")
    with stopped(second):
        one = Stream(server, begins=False)
    with stopped(first):
        other = Stream(server, begins=False)
    assert (one.pid, other.pid) == (first, second)
    one.begin(n)
    other.begin()
    return one, other


def test_hazard_b3_a_killed_http_process_loses_its_own_requests_alone(server: Server) -> None:
    """Its rows come back, and another takes its place."""
    dies, lives = of_both(server)
    kill(dies.pid)
    until(lambda: not is_alive(dies.pid))
    told = [lives.first, *lives.rest()]
    assert len(tokens_of(told)) == 4000
    assert end_of(told)[0] == "length"
    until(lambda: len(server.children("http_process")) == 2)
    until(server.is_empty)


def test_hazard_b9_an_http_process_that_reads_nothing_is_cut_off(server: Server) -> None:
    """After 2 s; its rows come back, others go on; once it runs again another takes its place."""
    stops, lives = of_both(server, n=30)  # which take longer than 2 s
    with stopped(stops.pid):
        assert len(tokens_of([lives.first, *lives.rest()])) == 4000
        until(lambda: _live_of(lives) == 0)
    until(lambda: not is_alive(stops.pid))
    until(lambda: len(server.children("http_process")) == 2)
    until(server.is_empty)


def _live_of(stream: Stream) -> int:
    """Requests that the engine has, as the HTTP process of a stream says."""
    stream.connection.request("GET", "/stats")
    return int(json.loads(stream.connection.getresponse().read())["live"])


def test_a_client_that_leaves_gives_its_row_back(server: Server) -> None:
    streams = [Stream(server) for _ in range(4)]
    for stream in streams:
        stream.leave()
    until(server.is_empty)


def the_compiler(server: Server) -> int:
    """Its process; where it has just died, the one after it."""
    found: list[int] = []

    def look() -> bool:
        found[:] = server.children("compiler_process")
        return bool(found)

    until(look)
    return found[0]


def test_a_form_whose_compiler_dies_is_refused_this_time_alone(server: Server) -> None:
    params = {**FORM, "choice": ["crash", "burn"]}
    server.generated(ids=[1], params={**FORM, "choice": ["safe", "sound"]})  # it runs, and knows
    compiler = the_compiler(server)
    answers: list[Any] = []

    def ask() -> None:
        response = server.post(ids=[1], params=params)
        answers.append((response.status, response.read().decode()))

    with stopped(compiler):
        asks = threading.Thread(target=ask)
        asks.start()
        time.sleep(1.0)  # it is asked meanwhile, and would have 5 s
        stream = Stream(server)  # others go on
        kill(compiler)
    asks.join()
    ((status, told),) = answers
    assert status == 400
    assert "its compiler ended while it was at it" in told
    assert end_of(server.generated(ids=[1], params=params))[0] in ("stop", "length")
    stream.leave()
    until(server.is_empty)


def test_a_compiler_that_dies_while_nobody_asks_is_replaced(server: Server) -> None:
    compiler = the_compiler(server)
    kill(compiler)
    until(lambda: the_compiler(server) != compiler)
    told = server.generated(ids=[1], params={**FORM, "choice": ["after", "wards"]})
    assert end_of(told)[0] in ("stop", "length")


def test_a_form_that_takes_too_long_is_refused_this_time_alone(server: Server) -> None:
    params = {**FORM, "choice": ["too", "long"]}
    server.generated(ids=[1], params={**FORM, "choice": ["in", "time"]})  # it runs, and knows
    compiler = the_compiler(server)
    with stopped(compiler):
        response = server.post(ids=[1], params=params)
        assert response.status == 400
        assert "takes more than 5 s" in response.read().decode()
    until(lambda: not is_alive(compiler))
    assert end_of(server.generated(ids=[1], params=params))[0] in ("stop", "length")


def test_hazard_b2_health_answers_at_once_under_load(server: Server) -> None:
    """While prompts of 4,000 tokens are read and 40 requests wait."""
    streams = [
        threading.Thread(target=server.generated, kwargs={"ids": [i] * 4000, "params": {}})
        for i in range(30)
    ]
    began, slowest = time.perf_counter(), 0.0
    for stream in streams:
        stream.start()
    for _ in range(30):
        asked = time.perf_counter()
        assert server.get("/health")[0] == 200
        slowest = max(slowest, time.perf_counter() - asked)
    for stream in streams:
        stream.join()
    # on an idle machine some milliseconds, of a second and more that the prompts take
    assert slowest < max(1.0, (time.perf_counter() - began) / 3)
    until(server.is_empty)


def exchanged(server: Server, sent: bytes) -> bytes:
    """What comes for these bytes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        received = b""
        with suppress(ConnectionError):
            while data := connection.recv(2**16):
                received += data
        return received


@pytest.mark.parametrize("name", [b"x", b"x" * 70_000])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
def test_a_head_that_is_too_large_is_refused(server: Server, name: bytes, end: bytes) -> None:
    """As a name or as a value, complete or not."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + name + b": " + b"y" * 70_000 + end
    assert exchanged(server, head).startswith(b"HTTP/1.1 431 ")
    many = b"".join(b"a%d: b\r\n" % number for number in range(20_000))
    assert exchanged(server, b"GET / HTTP/1.1\r\n" + many + end).startswith(b"HTTP/1.1 431 ")
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("trailer", [b"x: y\r\n" * 2**17, b"x: " + b"y" * 2**20])
def test_trailers_that_are_too_large_are_refused(server: Server, trailer: bytes) -> None:
    """Behind a body of chunks; the parser would keep all of them."""
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    received = exchanged(server, head + b"2\r\n{}\r\n0\r\n" + trailer)
    assert received.startswith(b"HTTP/1.1 431 "), received[:100]
    assert server.get("/health")[0] == 200


def test_requests_that_follow_each_other_on_a_connection_are_answered(server: Server) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(3):
        connection.request("GET", "/health", headers={"x": "y" * 30_000})
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (200, True)
