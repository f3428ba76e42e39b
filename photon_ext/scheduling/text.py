"""Tokens in, text out, a piece at a time: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from photon_ext.models.detokenizer import Detokenizer


class StopStrings:
    """Cuts a stream of text before the first stop string to be complete, and never gives out a part of one.

    Of several stops that become complete with the same character the longest counts. The result does not depend on how the text is split
    into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Takes a piece; returns what may be shown. After a hit it returns nothing."""
        if self.hit or not self._stops:
            return "" if self.hit else piece
        text = self._held + piece
        start = self._first_stop(text)
        if start is not None:
            self.hit, self._held = True, ""
            return text[:start]
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Text of one request: decoding, then stop strings. Without a detokenizer all text is empty."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """A stop string is complete; the request ends here."""
        return self._stops.hit

    def push(self, token: int) -> str:
        """Takes one token; returns the text that may be shown now, often one word, sometimes nothing."""
        return "" if self._detokenizer is None else self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest, once no token follows: unfinished characters, and what looked like the begin of a stop string."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.finish()
