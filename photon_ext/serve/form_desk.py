"""Where requests wait whose answers have a form, until the compiler of forms has seen it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from photon_ext.engine.given_forms import GivenForms
from photon_ext.errors import PhotonError, QueueFull, RequestError, shown
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.pattern import NotRegular
from photon_ext.serve.messages import (
    FROM_COMPILER,
    BlockingFrames,
    Compile,
    Compiled,
    Failed,
    Ready,
    Start,
)

if TYPE_CHECKING:
    from photon_ext.engine.grammar_compiler import GrammarCompiler
    from photon_ext.sampling.token_automaton import TokenAutomaton

DEADLINE_S = 5.0
STARTS_WITHIN_S = 60.0  # its modules are imported, and a tokenizer read, perhaps on a busy machine
MOST_WAITING = 16  # each may take DEADLINE_S
_LOG = logging.getLogger("photon_ext")
Then = Callable[[], None]
Otherwise = Callable[[PhotonError], None]


class _Waiting(NamedTuple):
    form: Grammar
    wanted: Callable[[], bool]
    then: Then
    otherwise: Otherwise


class FormDesk:
    """One thread, which asks the compiler for one form after the other. A form that crashes it, or
    takes too long, is refused this time; the parent brings another compiler.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        start: Start,
        hangs: Callable[[], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`compiler`: the engine's. `start`: what a compiler's process is told first. `hangs`:
        called where it has to be ended.
        """
        self._compiler = compiler
        self._given = compiler.given = GivenForms()
        self._start = start
        self._hangs = hangs
        self._deadline_s = deadline_s
        self._asked: SimpleQueue[_Waiting] = SimpleQueue()
        self._sockets: SimpleQueue[socket.socket] = SimpleQueue()
        self._frames: BlockingFrames | None = None
        self._sock: socket.socket | None = None
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="photon-forms", daemon=True)
        self._thread.start()

    def connect(self, sock: socket.socket) -> None:
        """A new compiler, at the other end of this socket; from any thread."""
        self._sockets.put(sock)

    def ask(
        self, form: Grammar, wanted: Callable[[], bool], then: Then, otherwise: Otherwise
    ) -> None:
        """Calls `then` once the form is with the engine, or `otherwise` with why it is not; at once
        where it is known, else on this desk's thread. Nothing is compiled for what is not `wanted`
        any more.
        """
        if not isinstance(self._given.find(form), (str, type(None))):  # an automaton
            then()
        elif self._asked.qsize() >= MOST_WAITING:
            otherwise(QueueFull(f"{MOST_WAITING} forms of answers wait to be compiled; try again"))
        else:
            self._asked.put(_Waiting(form, wanted, then, otherwise))

    def _run(self) -> None:
        with suppress(PhotonError):  # told to the first who asks for a form
            self._compiler.prepare()
        while True:
            waiting = self._asked.get()
            try:
                if waiting.wanted() and self._given.find(waiting.form) is None:
                    self._given.give(waiting.form, self._compiled(waiting.form))
                waiting.then()
            except PhotonError as error:
                waiting.otherwise(error)
            except BaseException as error:
                _LOG.exception("the form of an answer")
                waiting.otherwise(RequestError(f"the form cannot be used: {error!r}"))

    def _compiled(self, form: Grammar) -> TokenAutomaton | str:
        """What to give the engine. Raises RequestError."""
        what = f"{form.kind.value} {shown(form.text)}"
        frames = self._connected(what)
        self._count += 1
        end = time.monotonic() + self._deadline_s
        try:
            asked = Compile(self._count, form.kind.value, form.text, form.whitespace)
            frames.send(asked, self._deadline_s)
            made = self._answer(frames, end)
        except (EOFError, OSError) as error:
            self._lose()
            if isinstance(error, TimeoutError):
                self._hangs()
                raise RequestError(
                    f"{what} is refused: it takes more than {self._deadline_s:.0f} s to compile; "
                    "make it simpler"
                ) from error
            raise RequestError(
                f"{what} is refused: its compiler ended while it was at it, perhaps for want of "
                "memory; make it simpler"
            ) from error
        if made.passing:  # it ends, too
            self._lose()
        if made.refused is not None:
            raise RequestError(made.refused)
        if made.host is not None:
            return made.host
        try:
            return self._compiler.read(form, made.automaton or b"")
        except NotRegular as error:
            return str(error)

    def _answer(self, frames: BlockingFrames, end: float) -> Compiled:
        """Raises EOFError; OSError, also where it comes too late."""
        while True:
            message = frames.receive(max(end - time.monotonic(), 0.001))
            if isinstance(message, Compiled) and message.id == self._count:
                return message

    def _connected(self, what: str) -> BlockingFrames:
        """A compiler that is ready. Raises RequestError."""
        if self._frames is not None and self._frames.ended:  # while nobody asked it
            self._lose()
        while self._frames is None or not self._sockets.empty():
            try:
                sock = self._sockets.get(timeout=STARTS_WITHIN_S)
                self._lose()
                frames = BlockingFrames(sock, FROM_COMPILER)
                self._sock = sock
                frames.send(self._start, STARTS_WITHIN_S)
                told = frames.receive(STARTS_WITHIN_S)
            except (EOFError, OSError) as error:
                self._lose()
                if isinstance(error, TimeoutError):
                    self._hangs()
                continue
            except Empty as error:
                raise RequestError(
                    f"{what} cannot be compiled now: no compiler has started; try again"
                ) from error
            if isinstance(told, Failed):
                raise RequestError(f"{what} cannot be compiled: {told.message}")
            assert isinstance(told, Ready)
            self._frames = frames
        return self._frames

    def _lose(self) -> None:
        """The compiler is gone, or of no more use."""
        self._frames = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
