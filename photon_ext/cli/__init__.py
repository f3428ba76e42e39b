"""The command line: `photon-ext generate`, `chat`, `serve`, `bench`, `trace` and
`info`.

Exit codes: 0 done, 1 a request ended with an error, 2 wrong input or set-up, or stdout cannot be
written (one line on stderr says what to do), 130 interrupted.

This file imports almost nothing, so that from the first moment on Ctrl-C is told in one line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    with starting():
        from photon_ext.cli.command import run
    return run(argv)


@contextmanager
def starting() -> Iterator[None]:
    """Around imports: Ctrl-C ends the process at once.

    A KeyboardInterrupt would not do, because an import that is broken off may swallow it, or turn
    it into another error. A handler other than Python's own stays.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, which alone hears of Ctrl-C
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: object) -> None:
    try:
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), b"\ninterrupted\n")
    finally:
        os._exit(INTERRUPTED)
