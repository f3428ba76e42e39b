"""Python's garbage collector, switched off for a while: by several threads at once, until the
last of them is done.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False  # before the first of the pauses


@contextmanager
def no_collection() -> Iterator[None]:
    """Collects, and then not within the block."""
    global _pauses, _was_enabled
    gc.collect()
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def is_enabled() -> bool:
    """Whether the program leaves the collector on; pauses do not count."""
    with _lock:
        return _was_enabled if _pauses else gc.isenabled()
