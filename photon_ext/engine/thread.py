"""The engine thread: it starts with the first request and ends with the engine."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from photon_ext.engine.loop import EngineLoop


class EngineThread:
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        # one, and before it those whose start failed or was interrupted
        self._threads: list[_Thread] = []
        # a signal handler may close the engine while this very thread starts it
        self._starting = threading.RLock()

    def ensure(self, close: Callable[[], None]) -> None:
        """Starts it unless it runs; where a start fails, the next call tries again."""
        with self._starting:
            if not any(thread.runs for thread in self._threads):
                thread = _Thread(self._loop, close)
                self._threads.append(thread)
                atexit.unregister(close)  # of a start that failed
                # a thread that drives a device must not be frozen in the middle of a step
                atexit.register(close)
                thread.start()

    def join(self) -> None:
        """Waits for its end, where it runs."""
        with self._starting:
            # one that never ran keeps the engine
            self._threads = threads = [thread for thread in self._threads if thread.runs]
        for thread in threads:
            thread.wait()


class _Thread(threading.Thread):
    """Tells its end itself, by a lock that is taken until then. `join` and `is_alive` will not do:
    where Ctrl-C interrupts a join, CPython up to 3.12 takes a thread that runs for ended.
    """

    def __init__(self, loop: EngineLoop, close: Callable[[], None]) -> None:
        super().__init__(target=_run, args=(loop, close), name="photon-engine", daemon=True)
        self._ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended = True
            self._running.release()

    @property
    def runs(self) -> bool:
        """Whether it has begun, and not ended."""
        return self.ident is not None and not self._ended

    def wait(self) -> None:
        """Waits for its end. Any number of threads may, and where one is interrupted, again."""
        with self._running:
            pass


def _run(loop: EngineLoop, close: Callable[[], None]) -> None:
    """From its end on, which may be a crash, nothing keeps the engine but its callers: this is one
    more thread where the engine ends while a caller submits.
    """
    if loop.run():
        atexit.unregister(close)
    del close  # the traceback of a crash holds this frame
