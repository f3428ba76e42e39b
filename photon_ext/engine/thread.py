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
        self._threads: list[threading.Thread] = []
        # a signal handler may close the engine while this very thread starts it
        self._starting = threading.RLock()

    def ensure(self, close: Callable[[], None]) -> None:
        """Starts it unless it runs; where a start fails, the next call tries again."""
        with self._starting:
            if not any(thread.is_alive() for thread in self._threads):
                thread = threading.Thread(
                    target=_run, args=(self._loop, close), name="photon-engine", daemon=True
                )
                self._threads.append(thread)
                atexit.unregister(close)  # of a start that failed
                # a thread that drives a device must not be frozen in the middle of a step
                atexit.register(close)
                thread.start()

    def join(self) -> None:
        """Waits for its end, where it runs."""
        with self._starting:
            # one that never ran keeps the engine
            self._threads = threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            thread.join()


def _run(loop: EngineLoop, close: Callable[[], None]) -> None:
    """From its end on, which may be a crash, nothing keeps the engine but its callers: this is one
    more thread where it ends between a caller's post and that caller's look at the threads.
    """
    if loop.run():
        atexit.unregister(close)
    del close  # the traceback of a crash holds this frame
