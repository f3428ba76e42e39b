"""One request's state on the host. The engine thread owns it; callers hold its Request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from photon_ext.runtime import Admission, FinishReason, Row
from photon_ext.sampling import Constraint
from photon_ext.sampling.constraints import is_finished


class TokenSink(Protocol):
    """Where a sequence's tokens go: the caller's side of a request."""

    def add(self, token: int) -> None:
        """A token that is in no log."""

    def follow(self, log: Seq[Seq[int]], column: int) -> None:
        """From here on the tokens are those of a column of this log."""

    def settle(self) -> None:
        """Takes over what the log has of it; what comes there later is not its own."""


class SequenceState(Enum):
    """The one state machine of a request: it waits for a row, runs in one, drains (its tokens in
    flight are still delivered), is finished (they are skipped: a zombie), and is released once no
    step in flight uses its row.
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
        admission: prompt and parameters, checked.
        constraint: asked before each sampling, or None.
        request: the caller's side.
        watched: each token is handled by itself, for a constraint or for stop strings; else tokens
            stay in columns.
        row: its row, from admission on.
        ended: no token counts any more.
    """

    admission: Admission
    constraint: Constraint | None
    request: Any
    watched: bool = False
    row: Row | None = None
    ended: bool = False

    @property
    def state(self) -> SequenceState:
        """Where it stands; from admission on that is where its row stands."""
        if self.row is not None:
            return SequenceState(self.row.state.value)
        return SequenceState.RELEASED if self.ended else SequenceState.WAITING

    def advance(self, token: int, verdict: FinishReason | None) -> FinishReason | None:
        """Takes a token and the device's verdict to the constraint.

        Returns:
            Why the sequence ends with this token, or None. A finished constraint counts before the
            length cap.

        Raises:
            Exception: whatever the constraint raises.
        """
        if self.constraint is not None and verdict is not FinishReason.STOP:
            self.constraint.advance(token)
            if is_finished(self.constraint):
                verdict = FinishReason.STOP
        return verdict
