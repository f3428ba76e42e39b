"""Where the tokens of a request go: all that scheduling knows of its caller's side."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from photon_ext.runtime import TokenLogprobs


class TokenSink(Protocol):
    """Takes tokens one after the other (`add`), or finds its own in a column of the log (`attach`,
    `materialize`). Called by the engine thread alone.

    Attributes:
        id: the request's, larger than those of all requests that came before to the engine.
        cached_tokens: of its prompt, those that its first row found in cached pages.
    """

    id: int
    cached_tokens: int

    def add(self, tokens: Sequence[int]) -> None:
        """Its next tokens, which are in no log."""

    def add_logprobs(self, found: Sequence[TokenLogprobs]) -> None:
        """Those of its next tokens, before the tokens themselves."""

    def add_prompt_logprobs(self, found: Sequence[TokenLogprobs]) -> None:
        """Those of the next tokens of its prompt."""

    def attach(self, log: Sequence[array[int]], column: int) -> None:
        """From here on its tokens are what is not negative in a column of this log."""

    def materialize(self) -> None:
        """Takes over what the log has of it; what comes there later is not its own."""

    def tokens_from(self, begin: int) -> list[int]:
        """Its tokens so far, from this one on."""
