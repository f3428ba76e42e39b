"""The client: submits by the clock, whatever the answers do, and notes when tokens came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.common.result import BenchmarkError
from benchmarks.open_loop.loads import Ask

LEAD_S = 0.01  # from the begin of a run to the first arrival of a burst


class News(NamedTuple):
    """A first token, or an end: when (seconds of `time.perf_counter`), and of which request."""

    at: float
    index: int
    ended: bool


class Server(Protocol):
    """An engine that has loaded its model: its package's version, the size of its vocabulary, and
    what it says of its start.

    A run begins with `begin`; requests count from 0 in each. `submit` queues one for exactly
    `count` tokens, greedy; `news` waits for some, at most so many seconds, and may return none.
    `answer` has the tokens of a request that has ended, and raises BenchmarkError for one that
    failed. After the last end `times` has when each token of each request came, and `counters`
    what the engine itself says of the run, in which there was work for `busy_s`; `hits`, of each
    request, its prompt's tokens and how many of them were found in a cache; empty: it does not say.
    """

    version: str
    vocabulary: int
    start_up: Mapping[str, float]

    def begin(self) -> None: ...
    def submit(self, index: int, prompt: list[int], count: int) -> None: ...
    def news(self, timeout: float | None) -> Sequence[News]: ...
    def answer(self, index: int) -> list[int]: ...
    def times(self) -> list[list[float]]: ...
    def counters(self, busy_s: float) -> dict[str, Any]: ...
    def hits(self) -> list[tuple[int, int]]: ...
    def close(self) -> None: ...


class Run(NamedTuple):
    """When each request was due and was submitted, and when each of its tokens came."""

    due: list[float]
    sent: list[float]
    times: list[list[float]]


class Client:
    """One run: asks, and waits for all answers."""

    def __init__(self, server: Server, asks: Sequence[Ask]) -> None:
        self._server, self._asks = server, asks
        self._due, self._sent = [0.0] * len(asks), [0.0] * len(asks)
        self._prompts: list[list[int]] = [[]] * len(asks)
        self._left = len(asks)
        self._followers = {ask.after: i for i, ask in enumerate(asks) if ask.after is not None}

    def run(self) -> Run:
        """Raises BenchmarkError unless each answer is as long as asked."""
        self._server.begin()
        begin = time.perf_counter() + LEAD_S
        clocked = deque(
            (begin + ask.due_s, i) for i, ask in enumerate(self._asks) if ask.after is None
        )
        while self._left:
            while clocked and clocked[0][0] <= time.perf_counter():
                self._submit(*clocked.popleft())
            timeout = max(clocked[0][0] - time.perf_counter(), 0.0) if clocked else None
            for news in self._server.news(timeout):
                self._take(news)
        self._check()
        return Run(self._due, self._sent, self._server.times())

    def _submit(self, due: float, index: int) -> None:
        ask = self._asks[index]
        prompt = ask.prompt
        if ask.whole and ask.after is not None:
            prompt = self._prompts[ask.after] + self._server.answer(ask.after) + prompt
        self._prompts[index] = prompt
        self._due[index], self._sent[index] = due, time.perf_counter()
        self._server.submit(index, prompt, ask.answer)

    def _take(self, news: News) -> None:
        follower = self._followers.get(news.index)
        if follower is not None and (news.ended or not self._asks[follower].whole):
            del self._followers[news.index]
            self._submit(news.at, follower)
        self._left -= news.ended

    def _check(self) -> None:
        for index, ask in enumerate(self._asks):
            if (count := len(self._server.answer(index))) != ask.answer:
                told = f"request {index} got {count} of {ask.answer} tokens"
                raise BenchmarkError(f"{told}: the engine stopped early")
