"""TokenBytes: the bytes that single ids stand for, also those that are a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space
_LETTERS = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a letter: itself where that can be seen, else
    one from U+0100 on, in order (OpenAI's GPT-2).
    """
    others = [byte for byte in range(256) if byte not in _LETTERS]
    known = {chr(byte): byte for byte in _LETTERS}
    known |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    assert known.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return known


class TokenBytes:
    """Of one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token: one.content.encode() for token, one in added.items()}
        kinds = _kinds(backend)
        self._letters = _byte_of_letter() if "ByteLevel" in kinds else None
        self._pieces = bool({"ByteFallback", "Metaspace"} & kinds)

    def of(self, token: int) -> bytes:
        """What the id adds to a text; special tokens their names, ids without a token nothing.

        A tokenizer whose tokens are no known bytes (WordPiece) gives the text of the id alone.
        """
        if token in self._added:
            return self._added[token]
        name: str | None = self._backend.id_to_token(token)
        if name is None:
            return b""
        if self._letters is not None:
            letters = self._letters
            return bytes(letters[each] for each in name) if letters.keys() >= {*name} else b""
        if self._pieces:
            byte = _BYTE.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE, " ").encode()
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()


def _kinds(backend: Backend) -> set[str]:
    """The kinds of the decoder's steps."""
    if backend.decoder is None:
        return set()
    found: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in (found, *found.get("decoders", ()))}
