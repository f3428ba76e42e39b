"""The answers to one request, as they come: the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from photon_ext.serve.contract import Delta, End, EngineGone, Scores

MOST_TOKENS = 256
"""That are taken at once: to write what a slow reader has left would keep the event loop from all
others."""


class Canceller(Protocol):
    """Tells the engine that nobody wants these numbers any more; `over`: see Generation.cancel."""

    def __call__(self, numbers: list[int], over: bool = False) -> None: ...


class Answer:
    """One answer, as its client's messages name it.

    Attributes:
        closed: nothing more is wanted of it, or comes.
        inbox: of its request.
        index: which of its request's answers it is.
    """

    __slots__ = ("_delta", "_end", "_scores_left", "closed", "inbox", "index")

    def __init__(self, inbox: Inbox, index: int, scores_prompt: bool) -> None:
        self.closed = False
        self.inbox = inbox
        self.index = index
        self._delta: Delta | None = None
        self._end: End | None = None
        self._scores_left = scores_prompt

    def push(self, token: int) -> None:
        delta = self._delta
        if delta is None:
            delta = self._fresh()
        delta.tokens.append(token)

    def extend(self, tokens: Iterable[int], scores: Scores | None = None) -> None:
        delta = self._fresh()
        delta.tokens.extend(tokens)
        if scores is not None:
            delta.scores = scores if delta.scores is None else _joined(delta.scores, scores)

    def begin(self, cached_tokens: int) -> None:
        self._fresh().cached_tokens = cached_tokens

    def score_prompt(self, scores: Scores, last: bool) -> None:
        delta = self._fresh()
        before = delta.prompt_scores
        delta.prompt_scores = scores if before is None else _joined(before, scores)
        self._scores_left = not last
        if last and self._end is not None:
            self.finish(self._end)

    def finish(self, end: End) -> None:
        """It has ended; told once the scores of its prompt are there."""
        self._end = end
        if not self._scores_left:
            self._fresh().end = end
            self.inbox.close(self)

    def take(self, most: int) -> Delta:
        """What has come since the last call, with `most` tokens at most; the rest stays."""
        delta, self._delta = self._delta, None
        assert delta is not None
        if len(delta.tokens) > most:
            self._delta = _cut(delta, most)
        return delta

    @property
    def waits(self) -> bool:
        """Whether something has come that was not taken."""
        return self._delta is not None

    def _fresh(self) -> Delta:
        if self._delta is None:
            self._delta = Delta(self.index)
            self.inbox.tell(self)
        return self._delta


class Inbox:
    """What has come of all answers to one request.

    Attributes:
        answers: by index.
        accepted: done when the engine has taken the request; fails with why it has not.
    """

    def __init__(self, first: int, n: int, scores_prompt: bool) -> None:
        """`first`: the client's number of answer 0."""
        loop = asyncio.get_running_loop()
        self.answers = [Answer(self, i, scores_prompt and i == 0) for i in range(n)]
        self.accepted: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._first = first
        self._open = n
        self._fresh: list[Answer] = []
        self._waiter: asyncio.Future[None] | None = None
        self._gone: EngineGone | None = None

    def tell(self, answer: Answer) -> None:
        """Something has come of it, for the first time since the last look."""
        self._fresh.append(answer)
        self._wake()

    def close(self, answer: Answer) -> None:
        """Nothing more comes of it."""
        if not answer.closed:
            answer.closed = True
            self._open -= 1
            self._wake()

    def fail(self, error: EngineGone) -> None:
        """The engine is gone."""
        self._gone = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._wake()

    def refuse(self, error: Exception) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def cancel(self, index: int | None) -> list[int]:
        """Closes one answer, or all; returns the client's numbers of those that had not ended."""
        chosen = self.answers if index is None else [self.answers[index]]
        numbers = [self._first + one.index for one in chosen if not one.closed]
        for answer in chosen:
            self.close(answer)
        gone = set(chosen)
        self._fresh = [one for one in self._fresh if one not in gone]
        return numbers

    async def take(self) -> list[Delta]:
        """See Generation.__anext__."""
        if self._fresh:
            await asyncio.sleep(0)  # whoever reads what has waited gives others their turn
        while not self._fresh:
            if not self._open:
                raise StopAsyncIteration
            if self._gone is not None:
                raise self._gone
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, left = list[Delta](), MOST_TOKENS
        for answer in self._fresh:
            if left <= 0:
                break
            deltas.append(answer.take(left))
            left -= len(deltas[-1].tokens)
        last = self._fresh[len(deltas) - 1]
        self._fresh = self._fresh[len(deltas) - last.waits :]
        return deltas

    def cancel_from_anywhere(self, cancel: Canceller) -> None:
        """Where a generation was lost, which a garbage collection may find on any thread."""
        if self._open:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(lambda: cancel(self.cancel(None)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveGeneration:
    """See contract.Generation."""

    def __init__(self, inbox: Inbox, cancel: Canceller) -> None:
        self._inbox, self._cancel = inbox, cancel

    def __aiter__(self) -> LiveGeneration:
        return self

    async def __anext__(self) -> list[Delta]:
        return await self._inbox.take()

    async def __aenter__(self) -> LiveGeneration:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._inbox.cancel_from_anywhere(self._cancel)

    def cancel(self, index: int | None = None, over: bool = False) -> None:
        self._cancel(self._inbox.cancel(index), over)


def _cut(delta: Delta, size: int) -> Delta:
    """Leaves its first tokens in it; returns the others, with the end."""
    rest = Delta(delta.index, delta.tokens[size:], end=delta.end)
    del delta.tokens[size:]
    delta.end = None
    if delta.scores is not None:
        delta.scores, rest.scores = _split(delta.scores, size)
    return rest


def _split(scores: Scores, size: int) -> tuple[Scores, Scores]:
    """Those of the first tokens, and of the others."""
    at = sum(scores.counts[:size])
    pieces = [slice(None, size), slice(size, None)], [slice(None, at), slice(at, None)]
    first, rest = (
        Scores(scores.sampled[own], scores.counts[own], scores.ids[likely], scores.values[likely])
        for own, likely in zip(*pieces, strict=True)
    )
    return first, rest


def _joined(first: Scores, second: Scores) -> Scores:
    return Scores(
        first.sampled + second.sampled,
        first.counts + second.counts,
        first.ids + second.ids,
        first.values + second.values,
    )
