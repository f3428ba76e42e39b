"""Detokenizer: text from token ids that arrive one at a time, over the library's DecodeStream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from photon_ext.errors import RequestError, shortened
from photon_ext.models.text.tokenizer_file import is_library_error, library_errors

_REPLACEMENT = "\ufffd"  # what decoders emit for bytes that are not, or not yet, a character
_MOST_HELD = 64  # ids; a character has at most four bytes, so that what is longer is no text


class Detokenizer:
    """Streams the text of one sequence: its pieces, joined, equal the text of all ids at once.

    A token may end inside a UTF-8 character. Its text is held back until the character is whole, or
    `flush` is called, or 64 ids are held, which then are no text and show as U+FFFD. Vocabularies
    with byte tokens decode a run of bytes as one: where a run has a valid beginning and then turns
    out to be no text, the pieces keep that beginning, which decoding at once does not.

    The library holds the ids of the last piece, because some decoders treat the first token of a
    text differently, and those that follow it. Tokens that decoding leaves out are kept from it:
    they would pile up, and a sequence that goes on behind its end token may have thousands in a
    row.
    """

    def __init__(
        self,
        backend: Backend,
        skip_special_tokens: bool = True,
        left_out: Callable[[int], bool] = lambda token: False,
    ) -> None:
        """`left_out`: whether decoding passes over an id, whatever stands around that."""
        self._backend = backend
        self._skip = skip_special_tokens
        self._left_out = left_out
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # ids of the last piece
        self._held: list[int] = []  # ids behind that, whose text is not given out yet

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is now certain, none while a character is incomplete.

        Raises:
            RequestError: the library fails on the ids.
        """
        if self._left_out(token):
            return ""
        self._held.append(token)
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # part of a run of bytes was given out, and then the run is no text
            return self.flush()
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise RequestError(
                f"the tokenizer fails on these ids ({shortened(str(error))})"
            ) from error
        if piece is None:
            return self.flush() if len(self._held) >= _MOST_HELD else ""
        self._context, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """Ends the sequence and returns what was held back.

        Bytes that never became a character show as U+FFFD.

        Raises:
            RequestError: the library fails on the ids.
        """
        given = self._decode(self._context)
        piece = self._decode(self._context + self._held)[len(given) :]
        if given.endswith(_REPLACEMENT):  # the library would give it out once more
            self._context = []
        self._held = []
        self._stream = DecodeStream(self._context, self._skip)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        with library_errors(RequestError, "the tokenizer fails on these ids"):
            text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text
