"""The way from callers' threads to the engine thread: submissions and cancels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from photon_ext.engine.input import Submission
from photon_ext.engine.request import Gate, Request
from photon_ext.errors import EngineDeadError, RequestError, describe
from photon_ext.sampling import Constraint


class Arrivals(NamedTuple):
    """What the engine thread takes at the begin of a turn.

    A cancel may be for a request that has ended, or comes at the same time.
    """

    submitted: tuple[Submission, ...]
    cancelled: tuple[Request, ...]
    closing: bool


class RequestQueue:
    """Open until `close` or `fail`; usable from any thread.

    The engine thread sleeps at a gate and not for a condition: Ctrl-C in one caller's notify() may
    use up that of the next.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = Gate()
        self._submitted: list[Submission] = []
        self._cancelled: list[Request] = []
        self._borrowed: set[int] = set()  # ids of constraint objects that serve a live request
        self._closing = False
        self._cause: BaseException | None = None
        self._owner: int | None = None
        self._taken = False
        self._ended = False
        self._process = os.getpid()

    def own(self) -> bool:
        """The calling thread becomes the engine thread.

        False: another has become it before; a pipeline bears one.
        """
        with self._lock:
            if self._taken:
                return False
            self._taken = True
        self._owner = threading.get_ident()
        return True

    def disown(self) -> None:
        """The engine thread ends: the system may give its number to any thread that starts
        later.
        """
        self._owner = None
        self._ended = True

    @property
    def ended(self) -> bool:
        """Whether there was an engine thread, which has ended."""
        return self._ended

    @property
    def owned(self) -> bool:
        """Whether the calling thread is the engine thread: it must not wait for itself."""
        return self._owner == threading.get_ident()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the engine's: there is no engine thread here, and
        locks may be held for ever.
        """
        return self._process != os.getpid()

    def check_wait(self) -> None:
        """To be called before waiting for a request.

        Raises:
            RequestError: on the engine thread.
            EngineDeadError: in a forked process.
        """
        self._check_fork()
        if self.owned:
            raise RequestError(
                "a constraint, which runs on the engine's own thread, cannot wait for a request of "
                "this engine: it would wait for ever; "
                "submit() and read the result elsewhere, or use another engine"
            )

    def post(self, submissions: Seq[Submission]) -> None:
        """Queues requests together, so that they are admitted in the same turn.

        Raises:
            EngineDeadError: closed, or failed.
            RequestError: a constraint object serves another request; nothing has been queued then.
        """
        self._check_fork()
        with self._lock:
            if self._cause is not None:
                raise EngineDeadError(
                    f"the engine has crashed ({describe(self._cause)}); make a new one"
                ) from self._cause
            if self._closing:
                raise EngineDeadError("the engine is closed; make a new one")
            self._borrow(
                [own for one in submissions if (own := one.sequence.constraint) is not None]
            )
            self._submitted.extend(submissions)
            self._changed.open()

    def cancel(self, request: Request) -> None:
        """Queues a cancel; nothing to do for a request that has ended, or where all end."""
        if self.forked:
            return
        with self._lock:
            if not (request.done or self._closing or self._cause is not None):
                self._cancelled.append(request)
                self._changed.open()

    def close(self) -> None:
        """Nothing is taken any more; the engine thread learns of it with its next turn."""
        if self.forked:
            return
        with self._lock:
            self._closing = True
            self._changed.open()

    def fail(self, cause: BaseException) -> list[Submission]:
        """The engine has crashed: returns the requests that nobody will take any more."""
        with self._lock:
            self._cause = cause
            left, self._submitted = self._submitted, []
            return left

    def collect(self, busy: Callable[[], bool]) -> Arrivals:
        """The engine's side: takes everything; sleeps until there is something, unless the
        engine is `busy`.
        """
        while True:
            with self._lock:
                if self._submitted or self._cancelled or self._closing or busy():
                    # Taken before it is copied: a garbage collection on this very thread, which has
                    # the lock, may cancel a request.
                    submitted, self._submitted = self._submitted, []
                    cancelled, self._cancelled = self._cancelled, []
                    return Arrivals(tuple(submitted), tuple(cancelled), self._closing)
            self._changed.wait()

    def give_back(self, constraint: Constraint | None) -> None:
        """The request of this constraint has ended; the object may serve another."""
        with self._lock:
            self._borrowed.discard(id(constraint))

    def _check_fork(self) -> None:
        # Torch's threads do not survive a fork: a new engine in the child waits for ever for them,
        # unless torch is told to use none.
        if self.forked:
            raise EngineDeadError(
                f"this engine was made in process {self._process} and its thread runs there; "
                f"process {os.getpid()} is a fork of it: "
                "use a fresh process instead (multiprocessing's 'spawn'), or call "
                "torch.set_num_threads(1) here and then make a new Engine"
            )

    def _borrow(self, constraints: Seq[Constraint]) -> None:
        """A constraint holds the state of one request, so it serves one at a time."""
        taken = set(self._borrowed)
        for constraint in constraints:
            if id(constraint) in taken:
                raise RequestError(
                    f"this {type(constraint).__name__} already serves another request; give each "
                    "request its own constraint, "
                    "or give the class a method fresh() that returns one in its start state"
                )
            taken.add(id(constraint))
        self._borrowed = taken
