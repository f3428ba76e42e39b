"""Vector clocks: who has seen how much of whom.

Source: Mattern, "Virtual time and global states of distributed systems" (1989); the epoch test is
FastTrack's (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from enum import IntEnum


class Actor(IntEnum):
    """Who can touch memory: the host thread, and the streams."""

    HOST = 0
    COMPUTE = 1
    IN_COPY = 2
    OUT_COPY = 3
    ADAPTERS = 4


Clock = tuple[int, int, int, int, int]
"""One count per actor: the accesses of that actor which happened before."""

ZERO: Clock = (0, 0, 0, 0, 0)


def join(a: Clock, b: Clock) -> Clock:
    """What someone knows who knows both."""
    return (
        a[0] if a[0] > b[0] else b[0],
        a[1] if a[1] > b[1] else b[1],
        a[2] if a[2] > b[2] else b[2],
        a[3] if a[3] > b[3] else b[3],
        a[4] if a[4] > b[4] else b[4],
    )


def tick(clock: Clock, actor: Actor) -> Clock:
    """The clock after one more action of ``actor``."""
    words = list(clock)
    words[actor] += 1
    return (words[0], words[1], words[2], words[3], words[4])
