"""One request's state on the host. The engine thread owns it; callers hold its Request."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from photon_ext.runtime import Admission, FinishReason, Row
from photon_ext.sampling import Constraint
from photon_ext.sampling.constraints import is_finished
from photon_ext.scheduling.policy import Key

_count = itertools.count()


class SequenceState(Enum):
    """A request waits for a row, runs in one, drains (its tokens in flight are still delivered), is
    finished (they are skipped: a zombie), and is released once no step in flight uses its row.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    RELEASED = "released"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request from submit to the release of its row.

    Attributes:
        request: the caller's side, which takes tokens one by one (`add`) or follows a column of the
            log (`follow`, `settle`).
        watched: each token is handled by itself, for a constraint or for stop strings; else tokens
            stay in columns.
        limit: what its length cap is: "max_new_tokens", or "max_len" where the context leaves less.
        priority: the higher, the sooner, under a policy that looks at it.
        deadline: when it ends at the latest, in seconds of `time.monotonic`; infinite: never.
        arrived: when it came, in seconds of `time.monotonic`.
        arrival: its place among all sequences, in order of arrival; a preemption keeps it.
        key: its place in the policy's order.
        row: its row, from admission on.
        ended: no token counts any more.
    """

    admission: Admission
    constraint: Constraint | None
    request: Any
    watched: bool = False
    limit: str = "max_new_tokens"
    priority: int = 0
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    arrival: int = field(default_factory=_count.__next__)
    key: Key = ()
    row: Row | None = None
    ended: bool = False

    @property
    def rank(self) -> tuple[Key, int]:
        """The smallest is the first to get a row, the largest the first to give it up."""
        return self.key, self.arrival

    @property
    def state(self) -> SequenceState:
        """From admission on that of its row."""
        if self.row is not None:
            return SequenceState(self.row.state.value)
        return SequenceState.RELEASED if self.ended else SequenceState.WAITING

    def advance(self, token: int, verdict: FinishReason | None) -> FinishReason | None:
        """Takes a token and the device's verdict to the constraint, which may raise anything.

        Returns why the sequence ends with this token, or None. A finished constraint counts before
        the length cap.
        """
        if self.constraint is not None and verdict is not FinishReason.STOP:
            self.constraint.advance(token)
            if is_finished(self.constraint):
                verdict = FinishReason.STOP
        return verdict
