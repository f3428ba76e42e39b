"""A step's tokens are cut up by client."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from photon_ext.engine import StepOutput
from photon_ext.engine.step_output import EndedRequest
from photon_ext.runtime import TokenLogprobs
from photon_ext.serve.messages import EndOf, Tokens
from photon_ext.serve.token_router import Route, TokenRouter


class Client:
    """Takes what would be sent, and reads it as a client does."""

    def __init__(self) -> None:
        self.requests: dict[int, Any] = {}
        self.shown_ids: bytes | None = None
        self.sent: list[Tokens] = []
        self.tokens: dict[int, list[int]] = {}
        self._ids: list[int] = []

    def send(self, message: Tokens) -> None:
        self.sent.append(message)
        if message.ids is not None:
            self._ids = list(array("q", message.ids))
        tokens = iter(array("i", message.tokens))
        counts = message.counts if message.counts is not None else bytes([1]) * len(self._ids)
        for number, count in zip(self._ids, counts, strict=True):
            self.tokens.setdefault(number, []).extend(next(tokens) for _ in range(count))
        assert list(tokens) == []


def routed(*of: Client) -> tuple[TokenRouter, list[int]]:
    """Requests 10, 11, ... of these clients in turn, whose own numbers are 1, 2, ..."""
    ready: list[int] = []
    router = TokenRouter(lambda route: ready.append(route.number))
    for number, client in enumerate(of, 1):
        request: Any = SimpleNamespace(id=9 + number, cached_tokens=number)
        client.requests[number] = request
        router.add(Route(client, number, request, scores_prompt=number == 1))  # type: ignore[arg-type]
    return router, ready


def step(ids: bytes, counts: list[int], tokens: list[int], **more: Any) -> StepOutput:
    return StepOutput(
        ids,
        bytes(counts),
        array("i", tokens).tobytes(),
        more.get("logprobs", {}),
        more.get("ends", ()),
    )


def test_each_client_gets_its_own_and_ids_once() -> None:
    a, b = Client(), Client()
    router, ready = routed(a, b, a)
    ids = array("q", [10, 11, 12]).tobytes()
    for first in (1, 4, 7):
        router(step(ids, [1, 1, 1], [first, first + 1, first + 2]))
    assert a.tokens == {1: [1, 4, 7], 3: [3, 6, 9]}
    assert b.tokens == {2: [2, 5, 8]}
    assert [message.ids is None for message in a.sent] == [False, True, True]
    assert [message.counts is None for message in a.sent] == [False, True, True]
    assert a.sent[0].cached == {1: 1, 3: 3}
    assert b.sent[0].cached == {2: 2}
    assert ready == [1]


def test_one_client_gets_the_column_as_it_is() -> None:
    a = Client()
    router, _ = routed(a, a)
    ids = array("q", [10, 11]).tobytes()
    output = step(ids, [1, 1], [5, 6])
    router(output)
    router(output)
    assert a.sent[1].tokens is output.tokens


def test_uneven_steps_and_ends() -> None:
    a, b = Client(), Client()
    router, _ = routed(a, b, a)
    ids = array("q", [10, 11, 12]).tobytes()
    router(step(ids, [1, 1, 1], [1, 2, 3]))
    router(step(ids, [2, 0, 1], [4, 5, 6], logprobs={12: [TokenLogprobs(-1.0, ((6, -1.0),))]}))
    end = EndedRequest(11, "length", "max_len")
    router(step(ids, [1, 0, 1], [7, 8], ends=[end]))
    assert a.tokens == {1: [1, 4, 5, 7], 3: [3, 6, 8]}
    assert b.tokens == {2: [2]}
    assert b.sent[-1].ends == [EndOf(2, "length", "max_len", None)]
    assert a.sent[1].scores.keys() == {3}
    assert list(b.requests) == []
    router(step(ids, [1, 0, 1], [9, 10]))  # a step that was in flight when it ended
    router(step(array("q", [10, 12]).tobytes(), [1, 1], [11, 12]))
    assert a.tokens == {1: [1, 4, 5, 7, 9, 11], 3: [3, 6, 8, 10, 12]}
    assert b.tokens == {2: [2]}


def test_who_ends_without_a_token_hears_of_it() -> None:
    a, b = Client(), Client()
    router, ready = routed(a, b)
    router(step(b"", [], [], ends=[EndedRequest(10, "cancelled"), EndedRequest(99, "length")]))
    assert a.sent[0].ends == [EndOf(1, "cancelled", None, None)]
    assert a.sent[0].cached == {1: 1}
    assert ready == [1]
    assert b.sent == []
