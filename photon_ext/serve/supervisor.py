"""The parent of a server's processes: it starts them, restarts those that may die, and ends all
with the engine. It imports neither torch nor what its children do.
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from enum import Enum
from typing import Any

from photon_ext.serve.child import Child
from photon_ext.serve.messages import (
    FROM_CHILD,
    Beat,
    Compiler,
    CompilerHangs,
    Failed,
    FrameReader,
    Link,
    Ready,
    Start,
    frame,
)
from photon_ext.serve.settings import EngineSettings, HttpSettings
from photon_ext.serve.wake_pipe import WakePipe

TICK_S = 0.25
LAST_WORDS_S = 1.2  # for HTTP processes, to tell clients that the engine is gone
ENGINE_ENDS_S = 5.0
RETRY_S = 1.0  # after a process could not be started
STEADY_S = 10.0  # who dies sooner is started again later and later
MOST_STARTS = 3  # of an HTTP process that never served
_LOG = logging.getLogger("photon_ext")


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


class _Worker:
    """An HTTP process, or the one after it.

    Attributes:
        started, due: when it was started, or is to be, in seconds of time.monotonic.
        early_ends: how many one after the other have died soon after their start.
        has_served: one of them has been ready.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.ready = False
        self.has_served = False
        self.started = 0.0
        self.early_ends = 0
        self.due: float | None = None

    @property
    def child_name(self) -> str:
        return f"HTTP process {self.number}"


class Supervisor:
    """Runs in one thread, which must live as long as the children: they end with it.

    Attributes:
        why: once all has ended: why, or "" where that was wanted.
    """

    def __init__(
        self,
        engine: EngineSettings,
        http: HttpSettings | None = None,
        on_ready: Callable[[dict[str, Any]], None] = lambda card: None,
    ) -> None:
        """`on_ready`: called with the engine's card when all who serve are ready, once."""
        self.why = ""
        self._settings = engine
        self._http = http
        self._on_ready = on_ready
        self._state = State.STARTING
        self._selector = selectors.DefaultSelector()
        self._pipe = WakePipe()
        self._selector.register(self._pipe, selectors.EVENT_READ, self._woken)
        self._stops = 0
        self._signal: int | None = None
        self._links: list[socket.socket] = []  # the engine's ends, until it has been told
        self._engine: Child | None = None
        self._compiler: Child | None = None
        self._compiler_due: float | None = None
        self._card: dict[str, Any] | None = None
        self._workers = [_Worker(i) for i in range(http.settings.workers if http else 0)]
        self._beat: Beat | None = None
        self._silent_s = 0.0
        self._code = 0
        self._deadline: float | None = None
        self._told_at = 0.0
        self._told_ready = False

    def link(self) -> socket.socket:
        """A new client's end of a channel to the engine; before `run`, or on its thread."""
        ours, engines = socket.socketpair()
        if self._engine is None:
            self._links.append(engines)
        else:
            self._give(engines, Link())
        return ours

    def stop(self, number: int | None = None) -> None:
        """Ends all: drains first; at once, where it is called again. From any thread, and from
        signal handlers.
        """
        self._stops += 1
        self._signal = number
        self._pipe.wake()

    def run(self) -> int:
        """Until all has ended; returns an exit code."""
        try:
            self._start_engine()
            for worker in self._workers:
                self._start_worker(worker)
            last = time.monotonic()
            while not self._ended():
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                now = time.monotonic()
                # where this process itself was stopped nobody else was silent
                self._tick(now, min(now - last, 2 * TICK_S))
                last = now
        finally:
            self._kill_all()
            for sock in self._links:  # of an engine that could not be started
                sock.close()
            self._selector.close()
            self._pipe.close()
        return self._code

    # --- starting ---------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        child = self._engine = Child("engine", "photon_ext.serve.engine_process")
        told = asdict(self._settings)
        child.channel.sendall(frame(Start(told)))
        self._watch(child, self._engine_says, self._engine_died)
        for sock in self._links:
            self._give(sock, Link())
        self._links.clear()

    def _start_compiler(self) -> None:
        self._compiler_due = None
        engines, compilers = socket.socketpair()
        try:
            child = self._compiler = Child(
                "compiler of forms", "photon_ext.serve.compiler_process", [compilers]
            )
        except OSError:
            engines.close()
            raise
        finally:
            compilers.close()
        self._watch(child, lambda message: None, self._compiler_died)
        self._give(engines, Compiler())

    def _start_worker(self, worker: _Worker) -> None:
        assert self._http is not None
        worker.due, worker.ready, worker.started = None, False, time.monotonic()
        link = self.link()
        given = [link, self._http.socket]
        with link:
            child = worker.child = Child(worker.child_name, "photon_ext.serve.http_process", given)
        settings = replace(self._http.settings, worker=worker.number)
        with suppress(OSError):  # it has died already, which is seen otherwise
            child.channel.sendall(frame(Start(asdict(settings))))
        self._watch(
            child,
            lambda message: self._worker_says(worker, message),
            lambda: self._worker_died(worker),
        )

    def _give(self, sock: socket.socket, message: Link | Compiler) -> None:
        """Hands one end of a channel to the engine."""
        assert self._engine is not None
        with suppress(OSError):  # it has died, which is seen otherwise
            socket.send_fds(self._engine.channel, [frame(message)], [sock.fileno()])
        sock.close()

    def _watch(self, child: Child, says: Callable[[Any], None], died: Callable[[], None]) -> None:
        reader = FrameReader(FROM_CHILD)

        def receive() -> None:
            if child.channel.fileno() < 0:  # `end` came before, in the same look
                return
            try:
                data = child.channel.recv(2**16)
            except OSError:
                data = b""
            if not data:  # its end is told by its pidfd
                self._selector.unregister(child.channel)
            for message in reader.feed(data):
                says(message)

        def end() -> None:
            with suppress(OSError, BlockingIOError):  # its last words
                child.channel.setblocking(False)
                while data := child.channel.recv(2**16):
                    for message in reader.feed(data):
                        says(message)
            with suppress(KeyError):
                self._selector.unregister(child.channel)
            self._selector.unregister(child.pidfd)
            child.wait(1.0)
            child.close()
            died()

        self._selector.register(child.channel, selectors.EVENT_READ, receive)
        self._selector.register(child.pidfd, selectors.EVENT_READ, end)

    # --- what children say ------------------------------------------------------------------------

    def _engine_says(self, message: Any) -> None:
        if isinstance(message, Beat):
            self._beat, self._silent_s = message, 0.0
        elif isinstance(message, Ready):
            self._card = message.card
            self._compiler_due = time.monotonic()
            self._look_ready()
        elif isinstance(message, Failed):
            self.why = message.message
        elif isinstance(message, CompilerHangs) and self._compiler is not None:
            _LOG.warning("the compiler of forms takes too long; another is started")
            self._compiler.kill()

    def _worker_says(self, worker: _Worker, message: Any) -> None:
        if isinstance(message, Ready):
            worker.ready = worker.has_served = True
            self._look_ready()
        elif isinstance(message, Failed) and self._state is State.STARTING:
            self._end(1, message.message)

    def _look_ready(self) -> None:
        if self._card is not None and all(one.ready for one in self._workers):
            if self._state is State.STARTING:
                self._state = State.SERVING
            if not self._told_ready:
                self._told_ready = True
                self._on_ready(self._card)

    # --- who has died -----------------------------------------------------------------------------

    def _engine_died(self) -> None:
        assert self._engine is not None
        code, self._engine = self._engine.code, None
        if self._state is State.ENDING:
            return
        told = self.why or f"the engine has ended ({_ended_by(code)})"
        self._end(1, told)

    def _compiler_died(self) -> None:
        self._compiler = None
        if self._state in (State.STARTING, State.SERVING, State.DRAINING):
            self._compiler_due = time.monotonic() + TICK_S

    def _worker_died(self, worker: _Worker) -> None:
        assert worker.child is not None
        code, worker.child = worker.child.code, None
        if self._state in (State.STARTING, State.SERVING):
            early = time.monotonic() - worker.started < STEADY_S
            worker.early_ends = worker.early_ends + 1 if early else 0
            if not worker.has_served and worker.early_ends >= MOST_STARTS:
                self._end(1, f"{worker.child_name} does not start ({_ended_by(code)})")
                return
            wait_s = min(0.1 * 2**worker.early_ends, 5.0)
            text = "%s has ended (%s); another is started"
            _LOG.warning(text, worker.child_name, _ended_by(code))
            worker.due = time.monotonic() + wait_s

    # --- time passes ------------------------------------------------------------------------------

    def _tick(self, now: float, passed_s: float) -> None:
        if self._state in (State.STARTING, State.SERVING):
            for worker in self._workers:
                if worker.due is not None and worker.due <= now and self._engine is not None:
                    self._start_again(worker, now)
        if self._compiler_due is not None and self._compiler_due <= now:
            try:
                self._start_compiler()
            except OSError as error:
                _LOG.warning("the compiler of forms cannot be started now: %s", error)
                self._compiler_due = now + RETRY_S
        if self._card is not None and self._engine is not None:
            self._look_for_life(passed_s)
        if self._state is State.DRAINING:
            self._drain(now)
        elif self._state is State.ENDING and self._deadline is not None and now > self._deadline:
            self._kill_all()

    def _start_again(self, worker: _Worker, now: float) -> None:
        try:
            self._start_worker(worker)
        except OSError as error:  # no memory or descriptor is left, for now
            _LOG.warning("%s cannot be started now: %s", worker.child_name, error)
            worker.due = now + RETRY_S

    def _look_for_life(self, passed_s: float) -> None:
        self._silent_s += passed_s
        stuck_s = 0.0 if self._beat is None else self._beat.stuck_s
        most, engine = self._settings.frozen_s, self._engine
        if self._state is State.ENDING or max(self._silent_s, stuck_s) <= most:
            return
        assert engine is not None
        told = "it gives no sign of life" if self._silent_s > most else "it makes no step"
        self.why = f"the engine is frozen: {told} for {most:.0f} s"
        engine.kill()

    def _drain(self, now: float) -> None:
        left = [worker for worker in self._workers if worker.child is not None]
        if not left:
            self._end(0, "")
            return
        if now >= self._told_at + 1.0 and self._beat is not None:
            self._told_at = now
            text = "draining: %d requests run, %d wait, for %.0f s more at the most"
            running = max(self._beat.live - self._beat.waiting, 0)
            _LOG.warning(text, running, self._beat.waiting, (self._deadline or now) - now)
            for worker in left:  # once more: one that has just been started ignores signals first
                if worker.child is not None:
                    worker.child.send_signal(signal.SIGTERM)
        if self._deadline is not None and now > self._deadline:
            self._end(0, "")

    # --- ending -----------------------------------------------------------------------------------

    def _woken(self) -> None:
        self._pipe.drain()
        if self._stops > 1:
            self._code = 128 + (self._signal or signal.SIGTERM)
            self._state = State.ENDING
            self._kill_all()
        elif self._state is State.SERVING and self._workers:
            assert self._http is not None
            self._state = State.DRAINING
            self._deadline = time.monotonic() + self._http.drain_s
            self._beat = None  # what was said before is not what has to be drained
            self._http.socket.close()
            for worker in self._workers:
                worker.due = None
                if worker.child is not None:
                    worker.child.send_signal(signal.SIGTERM)
        elif self._state is State.STARTING:  # nobody listens yet
            self._state = State.ENDING
            self._kill_all()
        elif self._state is State.SERVING:
            self._end(0, "")

    def _end(self, code: int, why: str) -> None:
        """All children end: the engine now, HTTP processes when they have told their clients."""
        self._state, self._code, self.why = State.ENDING, code, why
        alive = self._engine is not None
        self._deadline = time.monotonic() + (ENGINE_ENDS_S if alive and not code else LAST_WORDS_S)
        if self._compiler is not None:
            self._compiler.kill()
        if self._engine is None:
            return  # HTTP processes see that themselves, and tell their clients
        with suppress(OSError):
            self._engine.channel.shutdown(socket.SHUT_WR)
        for worker in self._workers:
            if worker.child is not None:
                worker.child.kill()

    def _children(self) -> list[Child]:
        found = [self._engine, self._compiler, *(worker.child for worker in self._workers)]
        return [child for child in found if child is not None]

    def _ended(self) -> bool:
        return self._state is State.ENDING and not self._children()

    def _kill_all(self) -> None:
        for child in self._children():
            child.kill()


def _ended_by(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
