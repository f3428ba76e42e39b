"""One request's generation state on the host.

The engine thread owns it; callers hold its Request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from photon_ext.runtime import FinishReason, Row
from photon_ext.sampling import Constraint
from photon_ext.sampling.constraints import is_finished
from photon_ext.scheduling.request import Output, Request, StreamEvent, Timings
from photon_ext.scheduling.text import TextStream


class SequenceState(Enum):
    """Waiting for a row, running in one, or ended: no token is taken any more, though its row
    may still be in flight (a zombie).
    """

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Sequence:
    """State from submit to the final event.

    Tokens go through two stations, so that the device never waits for text: `commit` takes a token
    as the pipeline reports it, `deliver` turns it into text and shows it to the caller after the
    next launch.

    Attributes:
        prompt_ids: the prompt's tokens.
        max_new_tokens: cap, already within the context.
        stop_ids: ids at which the device stops.
        temperature, seed: of the row's sampling.
        constraint: asked before each sampling, or None.
        text: decoder and stop strings.
        request: the caller's side.
        state: waiting, running or ended.
        row: its row, from admission on.
        token_ids: committed tokens.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    seed: int
    constraint: Constraint | None
    text: TextStream
    request: Request
    state: SequenceState = SequenceState.WAITING
    row: Row | None = None
    token_ids: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=lambda: Timings(time.perf_counter()))
    _shown: list[str] = field(default_factory=list)
    _closed: bool = False

    @property
    def max_step_tokens(self) -> int:
        """KV entries that the whole sequence may take; the last token's is never written."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    def admit(self, row: Row) -> None:
        self.row = row
        self.state = SequenceState.RUNNING

    def commit(self, token: int, verdict: FinishReason | None) -> FinishReason | None:
        """Takes a token and the device's verdict; advances the constraint.

        Returns:
            Why the sequence ends with this token, or None. A finished constraint counts before the
            length cap.

        Raises:
            Exception: whatever the constraint raises; the token is committed.
        """
        self.token_ids.append(token)
        self.timings.token()
        if self.constraint is not None and verdict is not FinishReason.STOP:
            self.constraint.advance(token)
            if is_finished(self.constraint):
                verdict = FinishReason.STOP
        return verdict

    def end(self) -> None:
        """No token counts from here on."""
        self.state = SequenceState.ENDED

    def deliver(self, token: int, is_stop: bool) -> bool:
        """Shows one committed token to the caller; a stop token has no text.

        True if it completed a stop string.
        """
        if self._closed:
            return False
        piece = "" if is_stop else self.text.push(token)
        self._shown.append(piece)
        self.request.publish(piece, token)
        return self.text.stopped

    def close(self, reason: FinishReason, error: str | None = None) -> None:
        """The final event, once; later calls do nothing.

        After an error, text that was held back stays so.
        """
        if self._closed:
            return
        piece = "" if reason is FinishReason.ERROR else self.text.finish()
        self._closed = True  # not before: where there is no text, the caller is still to hear of it
        self._shown.append(piece)
        output = Output(
            text="".join(self._shown),
            token_ids=tuple(self.token_ids),
            finish_reason=reason.value,
            error=error,
            prompt_tokens=len(self.prompt_ids),
            ttft_ms=self.timings.ttft_ms,
            tokens_per_s=self.timings.tokens_per_s(len(self.token_ids)),
        )
        self.request.finish(StreamEvent(piece, (), reason.value, error), output)
