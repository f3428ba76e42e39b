"""What callers may send as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from photon_ext.errors import RequestError, shown

if TYPE_CHECKING:
    from photon_ext.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_EXPECTED = (
    "give a string, a list of token ids, or a list of chat messages ({'role': ..., 'content': ...})"
)


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, raw: bool = False
) -> tuple[int, ...]:
    """Token ids of a prompt.

    A string is one user message where the model has a chat template, unless `raw`; otherwise it is
    encoded as it stands, behind the model's begin-of-text token if it uses one. Token ids are taken
    as they are.

    Raises:
        RequestError: the prompt is empty, of no known form, holds ids outside the vocabulary, or
            needs a tokenizer that is not there.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, raw)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(f"the prompt is a {type(prompt).__name__}; {_EXPECTED}")
    elif prompt and isinstance(prompt[0], Mapping):
        ids = _tokenizer(tokenizer).encode_chat([_checked_message(message) for message in prompt])
    else:
        ids = [_checked_id(token) for token in prompt]
    if not ids:
        raise RequestError(f"the prompt is empty; {_EXPECTED}")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"the prompt holds token id {shown(outside)}; ids of this model are 0 to "
            f"{vocab_size - 1}"
        )
    return tuple(ids)


def _encode_text(text: str, tokenizer: Tokenizer | None, raw: bool) -> list[int]:
    tokenizer = _tokenizer(tokenizer)
    if not text:
        raise RequestError(f"the prompt is empty; {_EXPECTED}")
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("this engine has no tokenizer; give the prompt as a list of token ids")
    return tokenizer


def _checked_id(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        raise RequestError(f"the prompt holds {shown(token)}, which is no token id; {_EXPECTED}")
    return token


def _checked_message(message: object) -> Message:
    if (
        not isinstance(message, Mapping)
        or not isinstance(message.get("role"), str)
        or "content" not in message
    ):
        raise RequestError(
            f"the chat holds {shown(message)}; each message needs a 'role' (a string) and its "
            "'content'"
        )
    return message
