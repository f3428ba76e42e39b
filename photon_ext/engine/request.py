"""What a caller holds of a request: its events, its result, and a way to cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from photon_ext.checks import check_seconds
from photon_ext.engine.output import End, Output, StreamEvent
from photon_ext.engine.reader import EventReader, read_output
from photon_ext.engine.token_feed import TokenFeed
from photon_ext.observe.request_meter import Life
from photon_ext.runtime.step import FinishReason
from photon_ext.sampling.answer_text import MadeText, StoppedText, TextReader

if TYPE_CHECKING:
    from photon_ext.engine.request_queue import RequestQueue
    from photon_ext.sampling.spatial import ObjectReader

Waker = Callable[[], None]
Progress = Callable[[int, int], object]


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
        """Waits until it is open, or `seconds` have passed; shuts it again."""
        self._shut.acquire(timeout=-1 if seconds is None else seconds)


class AsyncGate:
    """Where a coroutine waits for threads."""

    def __init__(self) -> None:
        self._loop, self._opened = asyncio.get_running_loop(), asyncio.Event()

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._opened.set)

    async def wait(self) -> None:
        await self._opened.wait()
        self._opened.clear()


class Request(TokenFeed):
    """A submitted prompt. Any number of readers, on any threads, may start at any time; each sees
    all events in order. In async code `await request` gives its output.

    A request that went wrong raises nothing: its output and last event have finish reason "error".

    Attributes:
        id: different from those of all other requests of the engine; StepOutput names it so.
        prompt_tokens: length of the prompt in tokens, those of a chat template included.
        cached_tokens: see Output; 0 before it gets a row.
        cancelled: `cancel` was called; it may have ended otherwise, or not yet.
        constraint_on: see Output.
        objects: reads the objects of the answer; None: it is text.
        include_stop: the text shows the stop.
    """

    def __init__(
        self,
        queue: RequestQueue,
        make_text: Callable[[], TextReader] = TextReader,
        prompt_tokens: int = 0,
        text: StoppedText | None = None,
        constraint_on: str | None = None,
        objects: ObjectReader | None = None,
        include_stop: bool = False,
    ) -> None:
        """Made by `Engine.submit`. `make_text` makes what turns tokens into text, for each reader,
        unless the engine makes the `text` (see TokenFeed).
        """
        super().__init__(text)
        self.id = next(queue.ids)
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.cancelled = False
        self._cancel_reason = FinishReason.CANCELLED
        self.constraint_on = constraint_on
        self.objects = objects
        self.include_stop = include_stop
        self._make_text = make_text
        self.submitted = perf_counter()
        self._queue = queue
        self._output: Output | None = None
        self._wakers: set[Waker] = set()
        # apart from them, so that a token wakes nobody who waits for the end
        self._end_wakers: set[Waker] = set()

    def life(self, admitted: float | None) -> Life:
        """What the meter counts of it, at its end. `admitted`: when it first got a row."""
        assert self.end is not None
        times = self.submitted, admitted, self.first_time, self.end.time
        return Life(self.end.reason.value, *times, self.prompt_tokens, self.materialized)

    @property
    def done(self) -> bool:
        """Whether the final event is there."""
        return self.end is not None

    @property
    def cancel_end(self) -> End:
        """How a cancel ends it."""
        return End(self._cancel_reason)

    def cancel(self, over: bool = False) -> None:
        """Ends the request with finish reason "cancelled", unless it has ended. Returns at once.

        Args:
            over: whoever makes its text has found a stop there: the reason is "stop".
        """
        if over:
            self._cancel_reason = FinishReason.STOP
        self.cancelled = True  # first: a request that is not queued yet is not found
        self._queue.cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Waits for the end.

        Args:
            timeout: seconds, from 0 on (else ConfigError); None waits as long as it takes.

        Raises:
            TimeoutError: the request is still running; it goes on.
            RequestError: called by a constraint of the same engine, which would wait for itself.
            EngineDeadError: called in a fork of the engine's process.
        """
        expected = "seconds >= 0, or None to wait as long as it takes"
        seconds = None if timeout is None else check_seconds("timeout", timeout, expected)
        if not self.done:
            self._queue.check_wait()
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
        stream(). Leaving early does not cancel. Raises as `result`, where it would wait.
        """
        gate, reader = Gate(), EventReader(self)
        with self._woken(self._wakers, gate.open):
            while not reader.ended:
                fresh = reader.take()
                yield from fresh
                if not fresh:
                    self._queue.check_wait()
                    gate.wait()

    async def stream(self, detach: bool = False) -> AsyncIterator[StreamEvent]:
        """Events as they come, to the final one, without blocking the event loop.

        Leaving early does not cancel the request; a cancelled task does, unless `detach`. Raises as
        `result`, where the request has not ended.
        """
        if not self.done:
            self._queue.check_wait()
        gate, reader = AsyncGate(), EventReader(self)
        with self._woken(self._wakers, gate.open), self._cancelled_with_task(detach):
            while not reader.ended:
                fresh = reader.take()
                for event in fresh:
                    yield event
                if not fresh:
                    await gate.wait()

    async def wait(self, detach: bool = False) -> Output:
        """The output, without blocking the event loop; `await request` is the same. As `stream`."""
        if not self.done:
            self._queue.check_wait()
            gate = AsyncGate()
            with self._woken(self._end_wakers, gate.open), self._cancelled_with_task(detach):
                while not self.done:
                    await gate.wait()
        return self._made_output()

    def __iter__(self) -> Iterator[StreamEvent]:
        """As `iter`."""
        return self.iter()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """As `stream`."""
        return self.stream()

    def __await__(self) -> Generator[Any, None, Output]:
        return self.wait().__await__()

    def finish(self, end: End, tokens: Sequence[int] = ()) -> None:
        """See TokenFeed.finish; wakes all who read or wait."""
        super().finish(end, tokens)
        self.wake()
        _wake(self._end_wakers)

    def wake(self) -> None:
        """Wakes who reads the events."""
        _wake(self._wakers)

    def make_text(self) -> TextReader:
        """What makes the text for one reader."""
        return self._make_text() if self.text is None else MadeText(self.text)

    def _made_output(self) -> Output:
        """Made where it is read first: the text costs the engine thread nothing."""
        if self._output is None:
            self._output = read_output(self)
        return self._output

    @contextmanager
    def _woken(self, wakers: set[Waker], wake: Waker) -> Iterator[None]:
        """Within the block the engine calls `wake`, at each event or, of `_end_wakers`, at the end.
        Whoever waits looks again in the block, for what came before.
        """
        wakers.add(wake)
        read = self._queue.read if wakers is self._wakers else set[Request]()
        read.add(self)
        try:
            yield
        finally:
            wakers.discard(wake)
            read.discard(self)
            if wakers:  # others read on, who may have come just now
                read.add(self)

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
            # the reader left between two events; its task may have been cancelled there, or be
            # about to, which is known from Python 3.11 on
            cancelling = getattr(task, "cancelling", int)
            if not detach and task is not None and (task.cancelled() or cancelling() > 0):
                self.cancel()
            raise


def wait_for_ends(requests: Sequence[Request], progress: Progress) -> None:
    """Waits until all have ended; calls `progress` with the number of those that have, and of all,
    at the begin and as often as it grows.
    """
    ends: SimpleQueue[int] = SimpleQueue()
    with ExitStack() as watched:
        for i, request in enumerate(requests):
            watched.enter_context(request._woken(request._end_wakers, partial(ends.put, i)))
        ended = {i for i, request in enumerate(requests) if request.done}
        progress(len(ended), len(requests))
        while len(ended) < len(requests):
            if (i := ends.get()) not in ended:
                ended.add(i)
                progress(len(ended), len(requests))


def _wake(wakers: set[Waker]) -> None:
    for wake in wakers.copy():  # readers come and go meanwhile
        try:
            wake()
        except BaseException:
            # the reader's event loop is closed, or is broken: nobody can be woken there any more
            wakers.discard(wake)
