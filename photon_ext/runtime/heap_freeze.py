"""Keeps what start-up made out of Python's cyclic garbage collector, whose full collections stop a loop as long as there is to look at.

torch and a few libraries make hundreds of thousands of objects that live as long as the process. A full collection takes 45 to 350 ms with
them, by the machine, and 0.01 ms without; a device that has 10 ms of work ahead waits for the rest. `gc.freeze` sets aside what there is.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.RLock()  # a collection may begin in here and end an engine, and its freeze, on this very thread
_held: set[HeapFreeze] = set()


class HeapFreeze:
    """From here to `release` all that exists now is left out of garbage collection; what is made later is collected as ever.

    Several add up, and the last release lets everything be collected again. Whoever runs the collector himself, by `gc.disable` or a
    `gc.freeze` of his own, is left alone: then this does nothing. Objects without cycles are freed as ever; so are engines.

    Args:
        collect: collect first, so that no garbage is set aside; the caller may have done so.
    """

    def __init__(self, collect: bool = True) -> None:
        if not gc.isenabled():
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
