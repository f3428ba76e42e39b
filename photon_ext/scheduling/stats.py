"""Counters of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestStats:
    """Counters of requests, which other threads may read.

    Attributes:
        timeouts: requests that their deadline ended.
        refusals: requests that a full queue refused.
    """

    timeouts: int = 0
    refusals: int = 0
