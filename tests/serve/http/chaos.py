"""Requests of clients that mean harm, or are broken, with good ones among them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias

import httptools

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "a key"
AT_ONCE = 32
PATIENCE_S = 90.0  # for one answer; others' forms are compiled before it, each up to a deadline
BUSY = (429, 503)  # what a good request may be told, and then asks again
HELLO = [{"role": "user", "content": "Hi, you"}]
FORM = {"type": "object", "properties": {"a": {"enum": [1, "two"]}}, "required": ["a"]}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 24, "temperature": 0}),
    (COMPLETIONS, {"prompt": "One", "max_tokens": 9, "seed": 7, "n": 2}),
    (COMPLETIONS, {"prompt": [*b"ids"], "max_tokens": 5, "temperature": 0, "logprobs": 1}),
    (COMPLETIONS, {"prompt": ["A", "B" * 300], "max_tokens": 12, "seed": 1, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": "yes or no: ", "choice": ["yes", "no"], "temperature": 0}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "seed": 3}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "seed": 3, "stream": True}),
    (
        CHAT,
        {
            "messages": HELLO,
            "max_tokens": 40,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"schema": FORM}},
        },
    ),
]
LONG: dict[str, Any] = {"messages": HELLO, "max_tokens": 1500, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 3}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"x": DEEP}, "required": ["x"]}
HOSTILE: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "(a{1,999}){1,999}"},
    {"regex": "(a|a)*(a|a)*b" * 8},
    {"regex": r"(?=a)\1\p{Nope}"},
    {"grammar": "root ::= root"},
    {"grammar": "start: missing"},
    {"grammar": 'root ::= "(" root ")" | ""'},
    {"grammar": "\0" * 100},
    {"choice": []},
    {"choice": ["a" * 5000] * 50},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///x"}}}},
    {"regex": "a", "grammar": "b"},
]
WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": "many"},
    {"n": 10**9},
    {"seed": 2**70},
    {"prompt": [-1, 10**12]},
    {"prompt": []},
    {"prompt": "x" * 300_000},
    {"prompt": [65] * 50_000},
    {"prompt": ["\ud800"]},
    {"stop": ["x" * 3] * 5000},
    {"logit_bias": {str(i): 1 for i in range(5000)}},
    {"logit_bias": {"nan": 1}},
    {"temperature": float("nan")},
    {"timeout_s": 1e-9},
    {"model": "../../etc/passwd"},
    {"stream_options": {"include_usage": True}},
    {"image": "x", "nonsense": None},
]


class Reply:
    """What httptools calls while it reads one answer after another."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.complete = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.bodies.append(b"")

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.complete += 1


class Connection:
    """One connection of a client, and all that came over it."""

    def __init__(self, port: int) -> None:
        self.reply = Reply()
        self._port = port

    async def __aenter__(self) -> Connection:
        self._sock = socket.socket()
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        await asyncio.get_running_loop().sock_connect(self._sock, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._sock.close()

    async def send(self, data: bytes) -> None:
        """Of which the server may read less: then its answer is there."""
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def read(self, size: int = 2**16) -> bytes:
        data = b""
        with suppress(ConnectionError):
            data = await asyncio.get_running_loop().sock_recv(self._sock, size)
        if data:
            self.reply.parser.feed_data(data)
        return data

    async def answers(self, count: int = 1) -> Reply:
        """So many, or those that came before the server closed."""
        while self.reply.complete < count and await self.read():
            pass
        return self.reply

    def half_close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Closes without a farewell."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


Kind: TypeAlias = Callable[[Random, Connection], Awaitable[None]]


def post(path: str, body: Any, key: str = KEY) -> bytes:
    """A request's bytes; `body`: bytes, or what JSON makes of it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def long(random: Random) -> bytes:
    return post(CHAT, {**LONG, "stream": random.random() < 0.5, "n": random.choice([1, 1, 2])})


def any_good(random: Random) -> bytes:
    return post(*random.choice(GOOD))


async def leaves(random: Random, client: Connection) -> None:
    """At any byte of a long answer, or before its first."""
    await client.send(long(random))
    with suppress(TimeoutError):
        async with asyncio.timeout(random.random() / 4):
            left = int(10 ** (random.random() * 5))
            while left > 0 and (data := await client.read(min(left, 2**16))):
                left -= len(data)
    if random.random() < 0.5:
        client.reset()


async def leaves_within_its_request(random: Random, client: Connection) -> None:
    sent = any_good(random)
    await client.send(sent[: random.randrange(len(sent))])


async def stops_to_read(random: Random, client: Connection) -> None:
    await client.send(post(CHAT, {**LONG, "stream": True, "n": 2}))
    await client.read(100)
    await asyncio.sleep(random.random())


async def sends_slowly(random: Random, client: Connection) -> None:
    sent = any_good(random)
    at = 0
    while at < len(sent):
        step = random.randint(1, 80)
        await client.send(sent[at : at + step])
        at += step
        await asyncio.sleep(random.random() / 100)
    await client.answers()


async def mangles(random: Random, client: Connection) -> None:
    """A body in which some bytes were changed, lost or put in."""
    path, body = random.choice(GOOD)
    content = bytearray(json.dumps(body).encode())
    for _ in range(random.randint(1, 8)):
        place = random.randrange(len(content))
        size = random.randrange(4)
        content[place : place + size] = random.randbytes(random.randrange(4))
        content = content or bytearray(b" ")
    await client.send(post(path, bytes(content)))
    await client.answers()


async def sends_no_text(random: Random, client: Connection) -> None:
    broken = random.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\u0000"])
    await client.send(post(COMPLETIONS, b'{"max_tokens":3,"prompt":"%b"}' % broken))
    await client.answers()


async def asks_wrongly(random: Random, client: Connection) -> None:
    await client.send(post(COMPLETIONS, {**SHORT, **random.choice(WRONG)}))
    await client.answers()


async def asks_for_a_hostile_form(random: Random, client: Connection) -> None:
    await client.send(post(COMPLETIONS, {**SHORT, **random.choice(HOSTILE)}))
    await client.answers()


async def brings_a_wrong_key(random: Random, client: Connection) -> None:
    path, body = random.choice(GOOD)
    await client.send(post(path, body, random.choice(["", KEY[:-1], KEY + "x", "é", "x" * 9000])))
    reply = await client.answers()
    assert reply.statuses in ([401], [400]), reply.statuses


async def nests_deeply(random: Random, client: Connection) -> None:
    depth = random.choice([500, 50_000, 300_000])
    await client.send(post(CHAT, b'{"messages":' + b"[" * depth + b"]" * depth + b"}"))
    await client.answers()


async def announces_too_much(random: Random, client: Connection) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY
    length = random.choice(["99999999999", "-1", "1e3", "0x10", "1, 2", "9" * 400])
    await client.send(f"{head}\r\ncontent-length: {length}\r\n\r\n".encode() + b"{}")
    await client.answers()


async def speaks_no_http(random: Random, client: Connection) -> None:
    spoken = [random.randbytes(300), b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n"]
    await client.send(random.choice(spoken) + b"\r\n\r\n")
    client.half_close()
    with suppress(httptools.HttpParserError):
        await client.answers()


async def wanders(random: Random, client: Connection) -> None:
    """To paths and by methods that there are not."""
    path = random.choice(
        ["/", "/v1/x", "/v1/models/..%2f..", "/%ff", "//", "/v1/chat/completions?"]
    )
    method = random.choice(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"])
    await client.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    with suppress(httptools.HttpParserError):  # it knows not that HEAD has no body
        await client.answers()


async def asks_in_line(random: Random, client: Connection) -> None:
    """All at once, and reads the answers then, or leaves behind the first."""
    count = random.randint(2, 5)
    await client.send(b"".join(any_good(random) for _ in range(count)))
    reply = await client.answers(random.choice([1, count]))
    assert reply.complete, reply.statuses


async def half_closes(random: Random, client: Connection) -> None:
    await client.send(random.choice([any_good, long])(random))
    client.half_close()
    await client.answers()


HARM: list[Kind] = [
    *[leaves] * 4,
    leaves_within_its_request,
    stops_to_read,
    sends_slowly,
    *[mangles] * 3,
    sends_no_text,
    *[asks_wrongly] * 3,
    asks_for_a_hostile_form,
    brings_a_wrong_key,
    nests_deeply,
    announces_too_much,
    speaks_no_http,
    wanders,
    asks_in_line,
    half_closes,
]


class Chaos:
    """Many clients at once; each request follows from the seed and its number.

    Attributes:
        statuses: how often each came.
        right: good requests that were answered as alone.
        faults: what was answered wrongly, with the request's number.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.right = 0
        self.faults: list[str] = []
        self._port, self._seed = port, seed
        self._alone: list[Any] = []

    async def alone(self) -> None:
        """Learns what good requests are answered, one after the other; none is told to wait."""
        answers = [await self._good(place) for place in range(len(GOOD))]
        self._alone = self._alone or answers
        assert answers == self._alone

    async def run(self, numbers: range) -> None:
        waiting = iter(numbers)

        async def client() -> None:
            for number in waiting:
                await self._one(number)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def _one(self, number: int) -> None:
        random = Random(f"{self._seed}:{number}")
        kind = None if number % 5 == 0 else random.choice(HARM)
        try:
            async with asyncio.timeout(PATIENCE_S):
                if kind is None:
                    place = random.randrange(len(GOOD))
                    assert await self._good(place) == self._alone[place], GOOD[place]
                    self.right += 1
                else:
                    await self._harm(random, kind)
        except Exception as error:
            name = "good" if kind is None else getattr(kind, "__name__", "")
            self.faults.append(f"request {number} ({name}): {error!r}")

    async def _harm(self, random: Random, kind: Kind) -> None:
        async with Connection(self._port) as client:
            try:
                await kind(random, client)
            finally:
                self._count(client.reply)

    def _count(self, reply: Reply) -> None:
        self.statuses.update(reply.statuses)
        worst = max(reply.statuses, default=0)
        assert worst < 500 or worst == 503, (worst, reply.bodies[-1][:300])

    async def _good(self, place: int) -> Any:
        while True:
            async with Connection(self._port) as client:
                await client.send(post(*GOOD[place]))
                reply = await client.answers()
            self._count(reply)
            assert reply.complete == 1, reply.statuses
            if reply.statuses[0] not in BUSY:
                assert reply.statuses == [200], reply.bodies
                return told(reply.bodies[0])
            await asyncio.sleep(0.05)


def told(body: bytes) -> list[Any]:
    """The texts of an answer, with their ends; of a stream, joined."""
    if body.startswith(b"data: "):
        assert body.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
        deltas = [event["choices"][0] for event in events]
        text = "".join(one["delta"].get("content", "") for one in deltas)
        return [(text, deltas[-1]["finish_reason"])]
    choices = json.loads(body)["choices"]
    return [
        (one["text"] if "text" in one else one["message"]["content"], one["finish_reason"])
        for one in choices
    ]
