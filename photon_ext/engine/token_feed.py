"""The tokens of a request: the engine thread alone writes them, any number of threads read them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from photon_ext.engine.output import End
from photon_ext.runtime import FinishReason, TokenLogprobs
from photon_ext.sampling.answer_text import StoppedText

_NO_LOG: Sequence[array[int]] = ()


class _Place(NamedTuple):
    """Where the tokens are, read and replaced as one: the first `own` in the request's own list,
    those behind in a place of its batch's log, from entry `start` on, where it is not negative.
    """

    own: int
    log: Sequence[array[int]] = _NO_LOG
    column: int = 0
    start: int = 0
    end: End | None = None


class Cursor(NamedTuple):
    """How far a reader is: how many tokens it has, and up to which entry of the log they lie."""

    tokens: int = 0
    place: _Place | None = None
    entry: int = 0


class TokenFeed:
    """Tokens are kept, so any number of readers may start at any time, and each sees them all.

    There is no lock that readers share with the engine thread: Ctrl-C could leave it taken, a fork
    find it taken for ever, a garbage collection, which may close a reader, come while it is taken.

    Attributes:
        text: makes the text on the engine thread, for stop strings; None: readers make it.
        logprobs: of each token, where they were asked for; there may be more than tokens.
        prompt_logprobs: of the tokens of the prompt from the second on, as far as they are known.
        first_time: when the first token came, in seconds of `time.perf_counter`.
    """

    def __init__(self, text: StoppedText | None = None) -> None:
        self.text = text
        self.first_time: float | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._tokens: list[int] = []
        self._place = _Place(0)

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens that are in no log. Where the text of one cannot be made it is not taken, nor are
        those behind it.
        """
        for token in tokens:
            if self.text is not None:
                self.text.push(token)
            self._append(token)
        self._place = _Place(len(self._tokens))

    def add_logprobs(self, found: Sequence[TokenLogprobs]) -> None:
        """See TokenSink."""
        self.logprobs.extend(found)

    def add_prompt_logprobs(self, found: Sequence[TokenLogprobs]) -> None:
        """See TokenSink."""
        self.prompt_logprobs.extend(found)

    def attach(self, log: Sequence[array[int]], column: int) -> None:
        """From here on the tokens are those of a place in this log."""
        self._place = _Place(len(self._tokens), log, column, len(log))

    def materialize(self) -> None:
        """Takes over what the log has of it; what comes there later is not its own."""
        _, log, column, start, end = self._place
        if log is not _NO_LOG:
            self._tokens += [token for step in log[start:] if (token := step[column]) >= 0]
            self._place = _Place(len(self._tokens), end=end)

    def finish(self, end: End, tokens: Sequence[int] = ()) -> None:
        """The end, with the last tokens, as far as they were not told yet. Where these, or what the
        text held back, complete a stop string, it is the stop string that ends the request.
        """
        if self.text is not None and end.error is None:
            for token in tokens[: len(tokens) - end.hides_last]:
                self.text.push(token)
            self.text.finish()
            if self.text.found is not None and end.reason in (
                FinishReason.LENGTH,
                FinishReason.STOP,
            ):
                end = replace(end, reason=FinishReason.STOP, stop_reason=self.text.found)
        self.materialize()
        for token in tokens:
            self._append(token)
        self._place = _Place(len(self._tokens), end=end)  # the tokens and the end at once

    def _append(self, token: int) -> None:
        if self.first_time is None:
            self.first_time = time.perf_counter()
        self._tokens.append(token)

    @property
    def materialized(self) -> int:
        """How many tokens it has, without those that are in a log."""
        return len(self._tokens)

    @property
    def end(self) -> End | None:
        """Why it has ended; None while it runs."""
        return self._place.end

    def tokens_from(self, begin: int) -> list[int]:
        """See TokenSink."""
        own = min(begin, len(self._tokens))
        return self.read(Cursor(own))[0][begin - own :]

    def read(self, seen: Cursor) -> tuple[list[int], End | None, Cursor]:
        """The tokens that a reader has not seen, the end, if no token follows, and how far the
        reader is then.
        """
        while True:
            place = self._place
            same = seen.place is place  # then all that are its own were seen
            tokens = [] if same else self._tokens[seen.tokens : place.own]
            begin = seen.entry if same else place.start
            behind = place.log[begin:]
            # the log goes on with tokens of others, but not before `materialize`
            if self._place is place:
                tokens += [token for step in behind if (token := step[place.column]) >= 0]
                cursor = Cursor(seen.tokens + len(tokens), place, begin + len(behind))
                return tokens, place.end, cursor
