"""An engine's tokens, for constraints of the host and of the device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from photon_ext.sampling.token_automaton import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """Made for the first grammar.

    Attributes:
        library: the tokens as llguidance wants them.
    """

    def __init__(
        self, library: LLTokenizer, size: int, end_ids: Iterable[int], pinned: bool
    ) -> None:
        """`size`: width of the logits; `pinned`: automata are copied from pinned memory."""
        self.library = library
        self._size = size
        self._end_ids = [token for token in dict.fromkeys(end_ids) if token < size]
        self._pinned = pinned

    @cached_property
    def tokens(self) -> TokenBytes:
        """As automata want them. Special tokens have no bytes, nor have ids without a token."""
        library = self.library
        known = range(min(self._size, library.vocab_size))
        found = [b"" if library.is_special_token(i) else library.decode_bytes([i]) for i in known]
        missing = [b""] * (self._size - len(found))
        return TokenBytes(found + missing, self._end_ids, self._pinned)
