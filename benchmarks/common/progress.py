"""Progress on stderr: a status line of `rich` in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_EVERY_S = 5.0


class Progress:
    """Says what is being measured; the first time at once."""

    def __init__(self) -> None:
        self._begin, self._last = time.monotonic(), float("-inf")
        self._status: Any = None

    def show(self, what: str) -> None:
        """What is going on now."""
        if sys.stderr.isatty() and (self._status is not None or self._open()):
            self._status.update(what)
            return
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            print(f"[{now - self._begin:.0f} s] {what}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the status line away, so that something can be printed."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _open(self) -> bool:
        """False where rich is not installed."""
        try:
            from rich.console import Console
        except ImportError:
            return False
        self._status = Console(stderr=True, highlight=False, markup=False).status("")
        self._status.start()
        return True
