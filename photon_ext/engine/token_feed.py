"""The tokens of a request: the engine thread alone writes them, any number of threads read them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from photon_ext.engine.output import End
from photon_ext.engine.text import StoppedText
from photon_ext.runtime import FinishReason, TokenLogprobs

_NO_LOG: Sequence[Sequence[int]] = ()


class _Place(NamedTuple):
    """Where the tokens are, read and replaced as one: the first `own` in the request's own list,
    those behind in a column of its batch's log, from entry `start` on.
    """

    own: int
    log: Sequence[Sequence[int]] = _NO_LOG
    column: int = 0
    start: int = 0
    end: End | None = None


class TokenFeed:
    """Tokens are kept, so any number of readers may start at any time, and each sees them all.

    There is no lock that readers share with the engine thread: Ctrl-C could leave it taken, a fork
    find it taken for ever, a garbage collection, which may close a reader, come while it is taken.

    Attributes:
        text: makes the text on the engine thread, for stop strings; None: readers make it.
        logprobs: of each token, where they were asked for; there may be more than tokens.
        first_time: when the first token came, in seconds of `time.perf_counter`.
    """

    def __init__(self, text: StoppedText | None = None) -> None:
        self.text = text
        self.first_time: float | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._tokens: list[int] = []
        self._place = _Place(0)

    def add(self, token: int) -> None:
        """A token that is in no log. Where its text cannot be made it is not taken."""
        if self.text is not None:
            self.text.push(token)
        self._append(token)
        self._place = _Place(len(self._tokens))

    def follow(self, log: Sequence[Sequence[int]], column: int) -> None:
        """From here on the tokens are those of a column of this log."""
        self._place = _Place(len(self._tokens), log, column, len(log))

    def settle(self) -> None:
        """Takes over what the log has of it; what comes there later is not its own."""
        _, log, column, start, end = self._place
        if log is not _NO_LOG:
            self._tokens.extend([step[column] for step in log[start:]])
            self._place = _Place(len(self._tokens), end=end)

    def finish(self, end: End, token: int | None = None) -> None:
        """The end, with the last token where it was not told yet. Where that, or what the text held
        back, completes a stop string, it is the stop string that ends the request.
        """
        if self.text is not None and end.error is None:
            if token is not None and not end.hides_last:
                self.text.push(token)
            self.text.finish()
            if self.text.found is not None and end.reason in (
                FinishReason.LENGTH,
                FinishReason.STOP,
            ):
                end = replace(end, reason=FinishReason.STOP, stop_reason=self.text.found)
        self.settle()
        if token is not None:
            self._append(token)
        self._place = _Place(len(self._tokens), end=end)  # the tokens and the end at once

    def _append(self, token: int) -> None:
        if self.first_time is None:
            self.first_time = time.perf_counter()
        self._tokens.append(token)

    @property
    def end(self) -> End | None:
        """Why it has ended; None while it runs."""
        return self._place.end

    def snapshot(self, position: int) -> tuple[list[int], End | None]:
        """Tokens from `position` on, and the end, if no token follows."""
        while True:
            place = self._place
            tokens = self._tokens[position : place.own]
            if place.log is _NO_LOG:
                return tokens, place.end
            behind = place.log[place.start + max(position - place.own, 0) :]
            # the log goes on with tokens of others, but not before the request has settled
            if self._place is place:
                return tokens + [step[place.column] for step in behind], place.end
