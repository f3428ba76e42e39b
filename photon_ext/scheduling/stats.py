"""Counters of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestStats:
    """Counters of requests, which other threads may read.

    Attributes:
        timeouts: requests that their deadline ended.
        refusals: requests that a full queue refused.
        prompt_tokens: prompt tokens of admitted rows, those of preempted requests again.
        prefix_hit_tokens: of them, those found in cached pages.
        device_constraints, host_constraints: requests that got a row with a constraint, by where
            it is kept.
        preemptions: requests that left their rows before they had ended.
    """

    timeouts: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    device_constraints: int = 0
    host_constraints: int = 0
    preemptions: int = 0
