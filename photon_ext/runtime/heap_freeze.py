"""Keeps what start-up made out of Python's cyclic garbage collector, whose full collections stop a
loop as long as there is to look at.

torch and a few libraries make hundreds of thousands of objects that live as long as the process. A
full collection takes 45 to 350 ms with them, by the machine, and 0.01 ms without; a device that has
10 ms of work ahead waits for the rest. `gc.freeze` sets aside what there is.
"""

from __future__ import annotations

import gc
import os
import threading

from photon_ext.runtime import collector

# a collection may begin in here and end an engine, and its freeze, on this very thread
_lock = threading.RLock()
_held: set[HeapFreeze] = set()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may hold it in the parent


class HeapFreeze:
    """From here to `release` all that exists now is left out of garbage collection; what is made
    later is collected as ever.

    Several add up, and the last release lets everything be collected again, also what the program
    has frozen meanwhile: Python cannot tell them apart. Where it has switched the collector off or
    frozen objects before, this does nothing. Objects without cycles are freed as ever; so are
    engines.

    Args:
        collect: collect first, so that no garbage is set aside; the caller may have done so.
    """

    def __init__(self, collect: bool = True) -> None:
        if not collector.is_enabled():
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
            if self not in _held:
                return
            _held.remove(self)
            if not _held:
                gc.unfreeze()
