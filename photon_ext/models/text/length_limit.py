"""LengthLimit: texts that are sure to be too long are refused before they are encoded."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from photon_ext.errors import RequestError

if TYPE_CHECKING:
    from photon_ext.models.text.tokenizer import Tokenizer


class LengthLimit:
    """Of one model: some megabytes of text take seconds and gigabytes to encode."""

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        """`max_len`: tokens of the context."""
        self._tokenizer = tokenizer
        self._max_len = max_len

    def check(self, characters: int) -> None:
        """Raises RequestError for a text of so many characters that is sure to be too long."""
        most = self._most
        if most is not None and characters > most:
            raise RequestError(
                f"the prompt has {characters} characters, which are more than the {self._max_len} "
                "tokens that the context holds; shorten it, or make the engine with a larger "
                "max_len"
            )

    @cached_property
    def _most(self) -> int | None:
        return self._tokenizer.most_characters(self._max_len)
