"""The constraint of a request whose answer has a grammar, over the native matcher of llguidance."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from photon_ext.errors import RequestError, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarConstraint:
    """Follows one answer through its grammar. Native code writes the mask into the row's words.

    The end tokens are allowed where the answer may end and may go on; where nothing may follow it
    is finished.

    Attributes:
        matcher: the library's.
        mask_bytes: size of its masks.
        filled: its next mask, where MaskThreads has filled it.
    """

    def __init__(
        self, matcher: LLMatcher, mask_bytes: int, what: str, on_failure: Callable[[], None]
    ) -> None:
        """`mask_bytes`: size of the matcher's masks; `what`: the grammar, for errors; `on_failure`
        is called before the error that says that the matcher is of no more use.
        """
        self.matcher = matcher
        self.mask_bytes = mask_bytes
        self.filled: memoryview | None = None
        self._what = what
        self._on_failure = on_failure

    @property
    def finished(self) -> bool:
        return bool(self.matcher.is_stopped())

    def advance(self, token: int) -> None:
        self.filled = None
        if not self.matcher.consume_token(token):
            self._check()

    def fill_bitmask(self, words: memoryview) -> None:
        if self.filled is not None:
            words[:] = self.filled[: len(words)]
        elif words.nbytes == self.mask_bytes:
            self._fill(words)
        else:  # the tokenizer has more tokens than the model
            mask = memoryview(bytearray(self.mask_bytes)).cast("i")
            self._fill(mask)
            words[:] = mask[: len(words)]
        # what has failed allows the end tokens: an answer that is cut would count as complete
        if self.matcher.is_error():
            words[:] = memoryview(bytes(words.nbytes)).cast("i")
            self._check()

    def _fill(self, words: memoryview) -> None:
        start = ctypes.c_char.from_buffer(words)
        self.matcher.unsafe_compute_mask_ptr(ctypes.addressof(start), self.mask_bytes)

    def _check(self) -> None:
        """Raises RequestError where the matcher has failed."""
        if self.matcher.is_error():
            self._on_failure()
            raise RequestError(
                f"{self._what} failed in this answer: {library_text(self.matcher.get_error())}; "
                "make it simpler"
            )


def library_text(message: str) -> str:
    """What the library says, on one line."""
    return shortened(" ".join(message.partition("<non-verbose/>")[0].split()), 300)
