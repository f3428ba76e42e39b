"""Detokenizer: text from token ids that arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what decoders emit for bytes that are not, or not yet, a character


class Detokenizer:
    """Streams the text of one sequence: the pieces, joined, equal the text of all ids decoded at
    once.

    A token may end inside a UTF-8 character; such text is held back until the character is whole or
    `flush` is called. Vocabularies with byte tokens decode a run of bytes as one: where a run has a
    valid beginning and then turns out to be no text, the pieces keep that beginning, which decoding
    at once does not.

    Only a short window is decoded for each token: the tokens since the last clean boundary, and
    those of the piece before it, because some decoders treat the first token of a text differently.
    Tokens that decoding leaves out are no part of it: a sequence that goes on behind its end token
    may have thousands in a row.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        left_out: Callable[[int], bool] = lambda token: False,
    ) -> None:
        """`decode`: the text of a list of ids; `left_out`: whether it passes over an id,
        whatever stands around that.
        """
        self._decode = decode
        self._left_out = left_out
        self._context: list[int] = []  # ids of the last piece, already given out
        self._context_text = ""
        self._pending: list[int] = []
        self._given = 0  # characters of the pending text already given out

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now certain; empty while a character is
        incomplete.
        """
        if self._left_out(token):
            return ""
        self._pending.append(token)
        text = self._pending_text()
        certain = text.rstrip(_REPLACEMENT)
        piece, self._given = certain[self._given :], max(self._given, len(certain))
        if text and len(certain) == len(text):
            self._settle()
        return piece

    def flush(self) -> str:
        """Ends the sequence: returns what was held back; bytes that never became a character
        show as U+FFFD.
        """
        piece = self._pending_text()[self._given :]
        self._settle()
        return piece

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _settle(self) -> None:
        self._context, self._pending, self._given = self._pending, [], 0
        self._context_text = self._decode(self._context)
