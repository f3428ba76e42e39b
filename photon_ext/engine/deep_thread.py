"""Native code that goes as deep as its input is nested, and may not end: on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from photon_ext.errors import CompilerBusy, describe

# What passes the bounds of sampling/grammar_bounds.py takes 0.3 s: one of those that run ends soon.
BUSY_S = 1.0
# Address space; memory is what is used of it. A chain of 5,000 references takes some 100 MB.
_STACK_BYTES = 2**29
_at_once = threading.BoundedSemaphore(4)  # those that have missed their deadline included
_starting = threading.Lock()  # the size of stacks is the process's

Result = TypeVar("Result")


class DeepThread(Generic[Result]):
    """Runs `work` once, from now on. Nobody can end it.

    Attributes:
        made: what it has returned; None: nothing yet, or it raised.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        """Raises CompilerBusy: too many run, or no thread can be started."""
        self.made: Result | None = None
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="photon-grammar", daemon=True
        )
        self._places = _at_once
        if not self._places.acquire(timeout=BUSY_S):
            raise CompilerBusy("others are being compiled, as many as may be at once; try again")
        try:
            self._start()
        except BaseException as error:
            if self._thread.ident is None:  # a thread that runs gives the place back itself
                self._places.release()
            if isinstance(error, RuntimeError):
                raise CompilerBusy(f"no thread can be started ({describe(error)})") from error
            raise

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has; waits up to `seconds` for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _start(self) -> None:
        with _starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self.made = work()
        finally:
            self._places.release()
