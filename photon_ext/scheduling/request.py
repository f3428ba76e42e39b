"""What a caller holds of a request: its events as they come, its result, and a way to cancel it.

Usable from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from photon_ext.errors import ConfigError, shown
from photon_ext.scheduling.gate import Gate


class StreamEvent(NamedTuple):
    """One delivery: a token, and the text that became certain with it. The last one has no token,
    but the finish reason.

    Attributes:
        text: to be joined to that of the events before; often a word, sometimes empty. The last
            event has what was held back, none after an error.
        token_ids: the token, a stop token included; empty in the last event.
        finish_reason: of the last event: "stop" (an end token, a stop string, a finished
            constraint), "length", "cancelled" or "error"; else None.
        error: what went wrong, with finish reason "error"; else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: the generated text, without stop strings and special tokens; empty without a
            tokenizer.
        token_ids: the generated ids, a final stop token included.
        finish_reason: "stop", "length", "cancelled" or "error".
        error: what went wrong, with finish reason "error"; else None.
        prompt_tokens: length of the prompt in tokens, those of a chat template included.
        ttft_ms: milliseconds from submit, once the prompt was encoded, to the commit of the first
            token; None without one.
        tokens_per_s: decode rate: tokens after the first by the time since the first; None below
            two tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    error: str | None
    prompt_tokens: int
    ttft_ms: float | None
    tokens_per_s: float | None


class Request:
    """A submitted prompt. Events are kept, so any number of readers may start at any time and each
    sees them all, in order.

    Readers may be on any thread. A request that went wrong raises nothing: its output and last
    event have finish reason "error".

    Events are kept as texts and tokens, and made where they are read: an object per token would be
    one more that every full garbage collection looks at, and would bring it about.

    There is no lock that readers share with the engine thread: Ctrl-C could leave it taken, a fork
    find it taken for ever, and a garbage collection, which may close a reader on any thread, come
    while it is taken. The engine thread alone writes, a token's text before the token; a reader
    leaves its waker before it looks. What one line does to a list or a set is done at once.
    """

    def __init__(
        self, cancel: Callable[[Request], None], check_wait: Callable[[], None] = lambda: None
    ) -> None:
        """`check_wait` is called before waiting, and raises where that would be for ever."""
        self._cancel = cancel
        self._check_wait = check_wait
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._end: tuple[StreamEvent, Output] | None = None  # the final event and the result
        self._wakers: set[Callable[[], None]] = set()
        # apart from them, so that a token wakes nobody who waits for the end
        self._end_wakers: set[Callable[[], None]] = set()

    @property
    def done(self) -> bool:
        """Whether the final event is there."""
        return self._end is not None

    def cancel(self) -> None:
        """Ends the request with finish reason "cancelled"; does nothing if it has ended.

        Returns at once; the final event follows.
        """
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Waits for the end.

        Args:
            timeout: seconds, from 0 on; None, and infinity, wait as long as it takes.

        Raises:
            ConfigError: the timeout is no such number.
            TimeoutError: the request is still running; it goes on.
            RequestError: called by a constraint of the same engine, which would wait for itself.
            EngineDeadError: called in a fork of the engine's process.
        """
        seconds = _checked_seconds(timeout)
        if not self.done:
            self._check_wait()
            gate = Gate()
            with self._woken(self._end_wakers, gate.open):
                if not self.done:
                    gate.wait(seconds)
            if not self.done:
                raise TimeoutError(
                    f"the request has not ended within {timeout} s; wait longer, or cancel() it"
                )
        assert self._end is not None
        return self._end[1]

    def iter(self) -> Iterator[StreamEvent]:
        """Events as they come, to the final one. Blocks the calling thread; in async code use
        stream(). Leaving early does not cancel.

        Raises:
            RequestError, EngineDeadError: as `result`, where it would wait.
        """
        if not self._holds(0):
            self._check_wait()
        gate = Gate()
        position = 0
        with self._woken(self._wakers, gate.open):
            while True:
                fresh = self._events(position)
                position += len(fresh)
                for event in fresh:
                    yield event
                    if event.finish_reason is not None:
                        return
                if not fresh:
                    self._check_wait()
                    gate.wait()

    async def stream(self) -> AsyncIterator[StreamEvent]:
        """Events as they come, to the final one, without blocking the event loop. Leaving early
        does not cancel the request.

        Raises:
            RequestError, EngineDeadError: as `result`, where the request has not ended.
        """
        if not self.done:
            self._check_wait()
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        position = 0
        with self._woken(self._wakers, wake):
            while True:
                arrived.clear()
                fresh = self._events(position)
                position += len(fresh)
                for event in fresh:
                    yield event
                    if event.finish_reason is not None:
                        return
                if not fresh:
                    await arrived.wait()

    def publish(self, text: str, token: int) -> None:
        """The engine's side: a token, and the text that became certain with it."""
        self._texts.append(text)
        self._tokens.append(token)
        _wake(self._wakers)

    def finish(self, final: StreamEvent, output: Output) -> None:
        """The engine's side: the last event, and the result."""
        self._end = (final, output)
        _wake(self._wakers)
        _wake(self._end_wakers)

    def _holds(self, position: int) -> bool:
        """Whether there is an event at `position`."""
        return self._end is not None or len(self._tokens) > position

    def _events(self, position: int) -> list[StreamEvent]:
        """Those from `position` on."""
        end, count = self._end, len(self._tokens)  # in this order: behind the end comes no token
        tokens = zip(self._texts[position:count], self._tokens[position:count], strict=True)
        final = () if end is None else end[:1]
        return [*(StreamEvent(text, (token,)) for text, token in tokens), *final]

    @contextmanager
    def _woken(self, wakers: set[Callable[[], None]], wake: Callable[[], None]) -> Iterator[None]:
        """Within the block the engine calls `wake`: at each event where `wakers` are those of
        readers, else at the end.
        """
        wakers.add(wake)
        try:
            yield
        finally:
            wakers.discard(wake)


def _wake(wakers: set[Callable[[], None]]) -> None:
    for wake in wakers.copy():  # readers come and go meanwhile
        try:
            wake()
        except BaseException:
            # the reader's event loop is closed, or is broken: nobody can be woken there any more
            wakers.discard(wake)


def _checked_seconds(timeout: float | None) -> float | None:
    """`timeout`, cut to what a lock can wait, 292 years."""
    if timeout is None:
        return None
    if not isinstance(timeout, Real) or not timeout >= 0:  # NaN is neither
        raise ConfigError(
            f"timeout is {shown(timeout)}; give seconds >= 0, or None to wait as long as it takes"
        )
    return float(min(timeout, threading.TIMEOUT_MAX))


@dataclass(slots=True)
class Timings:
    """Times of one request, seconds of `time.perf_counter`."""

    submitted: float
    first_token: float | None = None
    last_token: float | None = None

    def token(self) -> None:
        """A token was committed now."""
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token = self.last_token

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token is None else 1e3 * (self.first_token - self.submitted)

    def tokens_per_s(self, tokens: int) -> float | None:
        """Decode rate of `tokens` generated tokens, the first one and the prefill before it left
        out.
        """
        if (
            tokens < 2
            or self.first_token is None
            or self.last_token is None
            or self.last_token <= self.first_token
        ):
            return None
        return (tokens - 1) / (self.last_token - self.first_token)
