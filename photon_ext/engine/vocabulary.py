"""An engine's tokens, for constraints of the host and of the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from photon_ext.engine.automaton_folder import AutomatonFolder
from photon_ext.sampling.token_automaton import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """Made for the first grammar.

    Attributes:
        library: the tokens as llguidance wants them.
        folder: where automata over these tokens are kept; None: nowhere.
    """

    def __init__(
        self,
        library: LLTokenizer,
        size: int,
        end_ids: Iterable[int],
        pinned: bool,
        token_id: Callable[[str], int | None],
        folder: AutomatonFolder | None = None,
    ) -> None:
        """`size`: width of the logits; `pinned`: automata are copied from pinned memory;
        `token_id`: of a token's name.
        """
        self.library = library
        self.folder = folder
        self._token_id = token_id
        self._size = size
        self._end_ids = [token for token in dict.fromkeys(end_ids) if token < size]
        self._pinned = pinned

    def by_id(self, match: re.Match[str]) -> str:
        """What a grammar says in place of a match: of a special token's name, group 1, its id,
        as the library knows it by no name.
        """
        token = None if match[1] is None else self._token_id(match[1])
        known = token is not None and self.library.is_special_token(token)
        return f"<[{token}]>" if known else match[0]

    @cached_property
    def tokens(self) -> TokenBytes:
        """As automata want them. Special tokens have no bytes, nor have ids without a token."""
        library = self.library
        known = range(min(self._size, library.vocab_size))
        found = [b"" if library.is_special_token(i) else library.decode_bytes([i]) for i in known]
        missing = [b""] * (self._size - len(found))
        return TokenBytes(found + missing, self._end_ids, self._pinned)
