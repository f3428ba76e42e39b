"""Native code that goes as deep as its input is nested, and may not end: on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from photon_ext.errors import RequestError, describe

# What passes the bounds of sampling/grammar_bounds.py takes 0.3 s.
DEADLINE_S = 3.0
# Address space; memory is what is used of it. A chain of 5,000 references takes some 100 MB.
_STACK_BYTES = 2**29
_at_once = threading.BoundedSemaphore(4)  # those that have missed their deadline included
_starting = threading.Lock()  # the size of stacks is the process's


def run_deep(work: Callable[[], None]) -> bool:
    """Runs `work`, which must not raise. False where it has not ended in time: nobody can end it,
    and nobody may look at what it makes.

    Raises RequestError: no thread can be started.
    """
    if not _at_once.acquire(timeout=DEADLINE_S):
        return False

    def run() -> None:
        try:
            work()
        finally:
            _at_once.release()

    thread = threading.Thread(target=run, name="photon-grammar", daemon=True)
    try:
        with _starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    except RuntimeError as error:
        _at_once.release()
        raise RequestError(f"the grammar cannot be compiled now ({describe(error)})") from error
    thread.join(DEADLINE_S)
    return not thread.is_alive()
