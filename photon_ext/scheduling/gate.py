"""How a thread sleeps until another wakes it."""

from __future__ import annotations

import threading
from contextlib import suppress


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
