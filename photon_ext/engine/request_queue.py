"""The way from callers' threads to the engine thread: submissions and cancels."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from queue import Empty, SimpleQueue
from typing import NamedTuple

from photon_ext.engine.request import Request
from photon_ext.errors import EngineDeadError, QueueFull, RequestError, describe
from photon_ext.sampling import Constraint
from photon_ext.sampling.bad_words import WithoutSequences
from photon_ext.scheduling import Registry, RequestStats, Sequence


class Arrivals(NamedTuple):
    """What the engine thread takes at the begin of a turn. A cancel may come late, or at once."""

    submitted: list[Sequence[Request]]
    cancelled: list[Request]
    closing: bool


def give_way() -> None:
    """Lets the engine thread go on, if it waits for the interpreter: a thread that computes keeps
    it for 5 ms (`sys.getswitchinterval`), and while one submits many requests the device would run
    dry.
    """
    time.sleep(0)


class RequestQueue:
    """Open until `close` or `fail`; usable from any thread.

    What arrives goes through a SimpleQueue: Ctrl-C in it tears nothing, and a signal handler or a
    garbage collection may put something in while the same thread is in it.

    Attributes:
        read: the requests that somebody reads.
        ids: of requests to come.
    """

    def __init__(
        self,
        registry: Registry[Request] | None = None,
        capacity: int | None = None,
        stats: RequestStats | None = None,
    ) -> None:
        """`registry`: where requests are, until they end; None: a new one. `capacity`: requests
        that may run and wait, all together; None: any number. `stats`: where refusals are counted.
        """
        self.read: set[Request] = set()
        self._registry = Registry[Request]() if registry is None else registry
        self._capacity = capacity
        self._stats = RequestStats() if stats is None else stats
        self.ids: Iterator[int] = itertools.count(1)
        self._lock = threading.RLock()
        self._arrived: SimpleQueue[tuple[Sequence[Request], ...] | Request] = SimpleQueue()
        self._closing = False
        self._cause: BaseException | None = None
        self._owner: int | None = None
        self._taken = False
        self._process = os.getpid()

    def own(self) -> bool:
        """The calling thread becomes the engine thread. False: another has done so before."""
        with self._lock:
            if self._taken:
                return False
            self._owner, self._taken = threading.get_ident(), True
        return True

    def disown(self) -> None:
        """The engine thread ends; the system may give its number to another."""
        self._owner = None

    @property
    def fault(self) -> str | None:
        """What `fail` was told, in a few words; None: it was not called."""
        return None if self._cause is None else describe(self._cause)

    @property
    def ended(self) -> bool:
        """Whether there was an engine thread, which has ended."""
        return self._taken and self._owner is None

    @property
    def owned(self) -> bool:
        """Whether the calling thread is the engine thread: it must not wait for itself."""
        return self._owner == threading.get_ident()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork: no engine thread runs here, and locks may stay taken."""
        return self._process != os.getpid()

    def collect(self, rest: Callable[[], float | None]) -> Arrivals:
        """Takes everything; where there is nothing, it sleeps for `rest()` seconds, and asks again;
        None: until there is something; 0: no more.
        """
        closing = self._closing  # before the look at what was posted until then
        submitted: list[Sequence[Request]] = []
        cancelled: list[Request] = []
        rest_s = 0.0 if closing else rest()
        while rest_s != 0.0 or not self._arrived.empty():
            try:
                arrived = self._arrived.get(True, rest_s)
            except Empty:
                rest_s = rest()
                continue
            rest_s = 0.0
            if isinstance(arrived, Request):
                cancelled.append(arrived)
            else:
                submitted.extend(arrived)
        return Arrivals(submitted, cancelled, closing)

    def fail(self, cause: BaseException) -> None:
        """The engine has crashed: nothing comes any more."""
        with self._lock:
            self._cause = cause

    def check_wait(self) -> None:
        """Raises where a wait for a request would be for ever: RequestError, on the engine thread;
        EngineDeadError, in a forked process.
        """
        self.check_fork()
        if self.owned:
            raise RequestError(
                "a constraint, which runs on the engine's own thread, cannot wait for a request of "
                "this engine: it would wait for ever; submit() and read the result elsewhere, or "
                "use another engine"
            )

    def post(self, sequences: Seq[Sequence[Request]]) -> None:
        """Registers requests and queues them together, for the same turn; or none, and raises
        EngineDeadError (closed, failed or forked), QueueFull, or RequestError (a constraint object
        serves another request). Where Ctrl-C comes between, they are to be cancelled.
        """
        self.check_fork()
        with self._lock:
            self.check_room(len(sequences))
            self._check_lent(sequences)
            self._registry.add(sequences)  # first: the engine thread may end them at once
            self._arrived.put(tuple(sequences))
        give_way()

    def cancel(self, request: Request) -> None:
        """Queues a cancel; nothing to do for a request that has ended, or where all end."""
        if not (self.forked or request.done or self._closing or self._cause is not None):
            self._arrived.put(request)

    def close(self) -> None:
        """Nothing is taken any more, and all ends."""
        if not self.forked:
            with self._lock:
                self._closing = True
            self._arrived.put(())  # wakes the engine thread

    def check_fork(self) -> None:
        """Raises EngineDeadError in a forked process."""
        # Torch's threads do not survive a fork: a new engine in the child waits for ever for them,
        # unless torch is told to use none.
        if self.forked:
            raise EngineDeadError(
                f"this engine was made in process {self._process} and its thread runs there; "
                f"process {os.getpid()} is a fork of it: "
                "use a fresh process instead (multiprocessing's 'spawn'), or call "
                "torch.set_num_threads(1) here and then make a new Engine"
            )

    def check_room(self, count: int) -> None:
        """Raises EngineDeadError or QueueFull, as `post` does, where the requests could not be
        queued now; `post` checks again.
        """
        self.check_fork()  # first: another thread of the parent may have held the lock
        with self._lock:
            if self._cause is not None:
                raise EngineDeadError(
                    f"the engine has crashed ({describe(self._cause)}); make a new one"
                ) from self._cause
            if self._closing:
                raise EngineDeadError("the engine is closed; make a new one")
            live, capacity = len(self._registry), self._capacity
            if capacity is None or live + count <= capacity:
                return
            self._stats.refusals += count
        asked = "one more" if count == 1 else f"{count} more"
        raise QueueFull(
            f"the queue is full: {live} requests run or wait, {asked} would exceed the {capacity} "
            "that this engine takes (max_rows + max_waiting); try again when some have ended, or "
            "make the engine with a larger max_waiting"
        )

    def _check_lent(self, sequences: Seq[Sequence[Request]]) -> None:
        """Raises RequestError where a constraint object would serve two requests at a time: it
        holds the state of one.
        """
        lent = [own for one in sequences if (own := _lent(one)) is not None]
        taken = {id(_lent(one)) for one in self._registry.live} if lent else set[int]()
        for constraint in lent:
            if id(constraint) in taken:
                raise RequestError(
                    f"this {type(constraint).__name__} already serves another request; give each "
                    "request its own constraint, or give the class a method fresh() that returns "
                    "one in its start state"
                )
            taken.add(id(constraint))


def _lent(sequence: Sequence[Request]) -> Constraint | None:
    """What a caller may have given: beside bad words of several tokens it stands within another."""
    constraint = sequence.constraint
    if isinstance(constraint, WithoutSequences) and constraint.inner is not None:
        return constraint.inner
    return constraint
