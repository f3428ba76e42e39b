"""WakePipe: wakes a thread that waits in a selector."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class WakePipe:
    """Registered at a selector, it is readable once somebody has called `wake`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may come while its own thread has it

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        """From any thread, and from signal handlers; does nothing once it is closed."""
        with self._lock, suppress(BlockingIOError):  # the thread is awake
            if not self._closed:
                os.write(self._write, b"\0")

    def drain(self) -> None:
        """By the thread that has woken."""
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Once nobody waits any more; again, it does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)
