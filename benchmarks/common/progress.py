"""Progress of long runs: a bar of `rich` in a terminal, a line now and then elsewhere.

Always on stderr.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY_S = 20.0


class Progress:
    """How many of `total` parts are done. A context manager."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin, self._last = total, 0, time.monotonic(), 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    TextColumn,
                    TimeElapsedColumn,
                )
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(
                *columns, console=Console(stderr=True), redirect_stdout=True, transient=True
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str) -> None:
        """What is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            print(
                f"[{self._done}/{self._total}, {self._last - self._begin:.0f} s] {what}",
                file=sys.stderr,
                flush=True,
            )

    def step(self) -> None:
        """One part is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
