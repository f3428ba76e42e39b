"""Keeps Python's cyclic garbage collector out of the way: it pauses while graphs are captured, and
leaves out what start-up made.

torch and a few libraries make hundreds of thousands of objects that stay: a full collection takes
45 to 350 ms with them, and 0.01 ms without. A device that has 10 ms of work ahead waits meanwhile.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# reentrant: a collection may begin in here and end an engine, and its freeze, on this very thread
_lock = threading.RLock()
_held: set[HeapFreeze] = set()
_pauses = 0
_was_enabled = False  # before the first of the pauses


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may hold it in the parent


@contextmanager
def no_collection() -> Iterator[None]:
    """Collects, and then not within the block, nor in the blocks of other threads that overlap."""
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


class HeapFreeze:
    """From here to `release` all that exists now is left out of garbage collection.

    Several add up, and the last release lets everything be collected again, also what the program
    has frozen meanwhile: Python cannot tell them apart. Where it has switched the collector off or
    frozen objects before, this does nothing. ``collect``: first, so that no garbage is set aside.
    """

    def __init__(self, collect: bool = True) -> None:
        if not is_enabled():
            return
        if collect:
            gc.collect()
        with _lock:
            if _held or not gc.get_freeze_count():
                _held.add(self)
                gc.freeze()

    def release(self) -> None:
        """Ends this one's part; idempotent."""
        with _lock:
            if self in _held:
                _held.remove(self)
                if not _held:
                    gc.unfreeze()
