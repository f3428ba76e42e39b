"""counted: how far a loader is, for who waits at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

SILENT_S = 2.0  # what is done by then needs no progress
_EACH_S = 0.1


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """The items; on a stderr that is a terminal, after a while, a line such as "loading weights:
    120 of 253" that counts those that are done. It is gone at the end.
    """
    begin = shown = monotonic()
    width = 0
    try:
        for done, item in enumerate(items):
            now = monotonic()
            if now - begin >= SILENT_S and now - shown >= _EACH_S and sys.stderr.isatty():
                line, shown = f"{what}: {done} of {len(items)}", now
                width = len(line)
                sys.stderr.write(f"\r{line}")
                sys.stderr.flush()
            yield item
    finally:
        if width:
            sys.stderr.write(f"\r{' ' * width}\r")
            sys.stderr.flush()
