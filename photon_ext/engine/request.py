"""What a caller holds of a request: its events as they come, its result, and a way to cancel it.
Usable from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, NamedTuple

from photon_ext.engine.output import End, Output, StreamEvent, TextReader
from photon_ext.errors import ConfigError, describe, shown

Waker = Callable[[], None]
_NO_LOG: Sequence[Sequence[int]] = ()


class Gate:
    """Where one thread waits for others, which open it.

    A lock alone, and no threading.Condition or Event: their methods are Python, and Ctrl-C in one
    of them may leave a lock taken, or somebody in the queue who has left it, to whom the next call
    then goes.
    """

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()

    def open(self) -> None:
        with suppress(RuntimeError):  # it is open already
            self._shut.release()

    def wait(self, seconds: float | None = None) -> None:
        """Until it is open, or so many seconds have passed; shuts it again."""
        self._shut.acquire(timeout=-1 if seconds is None else seconds)


class _Feed(NamedTuple):
    """Where a request's tokens are, read and replaced as one: the first `own` in its own list,
    those behind in a column of its batch's log, from entry `start` on.
    """

    own: int
    log: Sequence[Sequence[int]]
    column: int
    start: int
    end: End | None

    @property
    def total(self) -> int:
        return self.own + len(self.log) - self.start


class Request:
    """A submitted prompt. Tokens are kept, so any number of readers may start at any time, and each
    sees them all, in order.

    Readers may be on any thread, and each makes its own text. A request that went wrong raises
    nothing: its output and last event have finish reason "error". In async code `await request`
    gives its output.

    There is no lock that readers share with the engine thread: Ctrl-C could leave it taken, a fork
    find it taken for ever, and a garbage collection, which may close a reader on any thread, come
    while it is taken. The engine thread alone writes; a reader leaves its waker before it looks.

    Attributes:
        prompt_tokens: length of the prompt in tokens, those of a chat template included.
    """

    def __init__(
        self,
        cancel: Callable[[Request], None],
        check_wait: Callable[[], None] = lambda: None,
        reader: Callable[[], TextReader] = TextReader,
        read: set[Request] | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Made by `Engine.submit`.

        Args:
            cancel: what `cancel` calls.
            check_wait: called before waiting; raises where that would be for ever.
            reader: makes what turns tokens into text, for each reader of its own.
            read: the requests that somebody reads, to which this one adds itself meanwhile.
            prompt_tokens: see Attributes.
        """
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel
        self._check_wait = check_wait
        self._reader = reader
        self._read = set() if read is None else read
        self._tokens: list[int] = []
        self._texts: list[str] | None = None  # where the engine makes the text, for stop strings
        self._feed = _Feed(0, _NO_LOG, 0, 0, None)
        self._submitted = time.perf_counter()
        self._first_token: float | None = None
        self._output: Output | None = None
        self._wakers: set[Waker] = set()
        # apart from them, so that a token wakes nobody who waits for the end
        self._end_wakers: set[Waker] = set()

    # --- callers ----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the final event is there."""
        return self._feed.end is not None

    def cancel(self) -> None:
        """Ends the request with finish reason "cancelled"; does nothing if it has ended. Returns at
        once; the final event follows.
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
        return self._made_output()

    def iter(self) -> Iterator[StreamEvent]:
        """Events as they come, to the final one. Blocks the calling thread; in async code use
        stream(). Leaving early does not cancel.

        Raises:
            RequestError, EngineDeadError: as `result`, where it would wait.
        """
        if self._feed.total == 0 and not self.done:
            self._check_wait()
        gate, events = Gate(), _Events(self)
        with self._woken(self._wakers, gate.open):
            while not events.ended:
                fresh = events.take()
                yield from fresh
                if not fresh:
                    self._check_wait()
                    gate.wait()

    async def stream(self, detach: bool = False) -> AsyncIterator[StreamEvent]:
        """Events as they come, to the final one, without blocking the event loop.

        Leaving early does not cancel the request; a cancelled task does.

        Args:
            detach: a cancelled task leaves the request running.

        Raises:
            RequestError, EngineDeadError: as `result`, where the request has not ended.
        """
        if not self.done:
            self._check_wait()
        arrived, wake = _async_gate()
        events = _Events(self)
        with self._woken(self._wakers, wake), self._cancelled_with_task(detach):
            while not events.ended:
                arrived.clear()
                fresh = events.take()
                for event in fresh:
                    yield event
                if not fresh:
                    await arrived.wait()

    async def wait(self, detach: bool = False) -> Output:
        """The output, without blocking the event loop; `await request` is the same.

        Args:
            detach: a cancelled task leaves the request running.

        Raises:
            RequestError, EngineDeadError: as `result`, where the request has not ended.
        """
        if not self.done:
            self._check_wait()
            arrived, wake = _async_gate()
            with self._woken(self._end_wakers, wake), self._cancelled_with_task(detach):
                while not self.done:
                    arrived.clear()
                    if not self.done:
                        await arrived.wait()
        return self._made_output()

    def __await__(self) -> Generator[Any, None, Output]:
        return self.wait().__await__()

    # --- the engine's side ------------------------------------------------------------------------

    def add(self, token: int) -> None:
        """A token that is in no log."""
        self._tokens.append(token)
        self._feed = _Feed(len(self._tokens), _NO_LOG, 0, 0, None)
        self._note_first()

    def publish(self, text: str, token: int) -> None:
        """A token, and the text that became certain with it, which the engine has made."""
        if self._texts is None:
            self._texts = []
        self._texts.append(text)
        self.add(token)

    def follow(self, log: Sequence[Sequence[int]], column: int) -> None:
        """From here on the tokens are those of a column of this log."""
        self._feed = _Feed(len(self._tokens), log, column, len(log), None)

    def settle(self) -> None:
        """Takes over what the log has of it; what comes there later is not its own."""
        _, log, column, start, end = self._feed
        if log is not _NO_LOG:
            self._tokens.extend([step[column] for step in log[start:]])
            self._feed = _Feed(len(self._tokens), _NO_LOG, 0, 0, end)

    def finish(self, end: End, token: int | None = None, text: str = "") -> None:
        """The end.

        Args:
            end: why.
            token: the last token, where it was not told yet.
            text: what the engine had held back, where it makes the text.
        """
        self.settle()
        if token is not None:
            self._tokens.append(token)
            self._note_first()
            if self._texts is not None:
                self._texts.append("")
        if self._texts is not None:
            self._texts.append(text)
        self._feed = _Feed(len(self._tokens), _NO_LOG, 0, 0, end)  # the tokens and the end at once
        self.wake()
        _wake(self._end_wakers)

    def wake(self) -> None:
        """Wakes who reads the events."""
        _wake(self._wakers)

    def _note_first(self) -> None:
        if self._first_token is None:
            self._first_token = time.perf_counter()

    # --- reading ----------------------------------------------------------------------------------

    def snapshot(self, position: int) -> tuple[list[int], End | None]:
        """Tokens from `position` on, and the end, if no token follows."""
        while True:
            feed = self._feed
            tokens = self._tokens[position : feed.own]
            if feed.log is _NO_LOG:
                return tokens, feed.end
            behind = feed.log[feed.start + max(position - feed.own, 0) :]
            # the log goes on with tokens of others, but not before the request has settled
            if self._feed is feed:
                return tokens + [step[feed.column] for step in behind], feed.end

    def texts(self, position: int, count: int) -> list[str] | None:
        """The engine's text of so many tokens; None where readers make it."""
        return None if self._texts is None else self._texts[position : position + count]

    def reader(self) -> TextReader:
        """What makes the text for one reader."""
        return self._reader()

    def _made_output(self) -> Output:
        """Made where it is read first: the text costs the engine thread nothing."""
        if self._output is None:
            events = _Events(self)
            self._output = self._output_of(events.take())
        return self._output

    def _output_of(self, events: list[StreamEvent]) -> Output:
        last, end = events[-1], self._feed.end
        assert end is not None
        assert last.finish_reason is not None
        ids = tuple(token for event in events for token in event.token_ids)
        first = self._first_token
        rate = None
        if len(ids) >= 2 and first is not None and end.time > first:
            rate = (len(ids) - 1) / (end.time - first)
        return Output(
            text="".join(event.text for event in events),
            token_ids=ids,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            prompt_tokens=self.prompt_tokens,
            ttft_ms=None if first is None else 1e3 * (first - self._submitted),
            tokens_per_s=rate,
        )

    @contextmanager
    def _woken(self, wakers: set[Waker], wake: Waker) -> Iterator[None]:
        """Within the block the engine calls `wake`: at each event where `wakers` are those of
        readers, else at the end.
        """
        wakers.add(wake)
        if wakers is self._wakers:
            self._read.add(self)
        try:
            yield
        finally:
            wakers.discard(wake)
            if wakers is self._wakers:
                self._read.discard(self)
                if wakers:  # others read on, who may have come just now
                    self._read.add(self)

    @contextmanager
    def _cancelled_with_task(self, detach: bool) -> Iterator[None]:
        task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not detach:
                self.cancel()
            raise
        except GeneratorExit:
            # the reader left between two events; its task may have been cancelled there
            if not detach and task is not None and _is_cancelled(task):
                self.cancel()
            raise


class _Events:
    """One reader's way through a request."""

    def __init__(self, request: Request) -> None:
        self.ended = False
        self._request = request
        self._position = 0
        self._text = request.reader()

    def take(self) -> list[StreamEvent]:
        """What has come since the last call."""
        tokens, end = self._request.snapshot(self._position)
        texts = self._request.texts(self._position, len(tokens))
        self._position += len(tokens)
        events: list[StreamEvent] = []
        try:
            for i, token in enumerate(tokens):
                is_stop = end is not None and end.hides_last and i == len(tokens) - 1
                if texts is not None:
                    piece = texts[i]
                else:
                    piece = "" if is_stop else self._text.push(token)
                events.append(StreamEvent(piece, (token,)))
            if end is not None:
                events.append(self._last(end))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            # meant for the reader, whose thread this is
            raise
        except BaseException as error:
            # no text for these tokens; tokenizers panic with a BaseException
            self._request.cancel()
            events += [StreamEvent("", (token,)) for token in tokens[len(events) :]]
            fault = f"the text could not be made: {describe(error)}"
            events.append(StreamEvent("", (), "error", None, fault))
        self.ended = bool(events) and events[-1].finish_reason is not None
        return events

    def _last(self, end: End) -> StreamEvent:
        held = self._request.texts(self._position, 1)
        piece = held[0] if held else "" if end.error is not None else self._text.finish()
        return StreamEvent(piece, (), end.reason.value, end.stop_reason, end.error)


def _async_gate() -> tuple[asyncio.Event, Waker]:
    """An event, and what sets it from any thread."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(arrived.set)

    return arrived, wake


def _is_cancelled(task: asyncio.Task[Any]) -> bool:
    """Whether it was, or is being cancelled; the latter is known from Python 3.11 on."""
    return task.cancelled() or getattr(task, "cancelling", int)() > 0


def _wake(wakers: set[Waker]) -> None:
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
