"""What callers may send as a prompt, and how it becomes token ids."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from photon_ext.errors import RequestError, describe, shown

if TYPE_CHECKING:
    import numpy as np

    from photon_ext.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | torch.Tensor | np.ndarray[Any, Any]"

_EXPECTED = (
    "give a string, a list or one-dimensional array of token ids, or a list of chat messages "
    "({'role': ..., 'content': ...})"
)


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Sequence[int]:
    """Token ids of a prompt, as they are given or encoded; whether the model has them is not asked.

    A string is one user message where the model has a chat template, unless `raw`; otherwise it is
    encoded as it stands, behind the model's begin-of-text token if it uses one. Token ids are taken
    from a sequence, a numpy array or a torch tensor, which is read from its device. The content of
    a chat message is a text, or a list of OpenAI's parts, of which texts are joined. `tools` are
    told by the chat template.

    Raises RequestError: the prompt is empty, of no known form, holds parts that are no text, has
    tools and no chat template that tells them, or needs a tokenizer that is not there.
    """
    ids: Sequence[int]
    if isinstance(prompt, str):
        ids = _encode_text(prompt, _tokenizer(tokenizer), raw, tools) if prompt else ()
    elif _is_array(prompt):
        ids = _array_ids(prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(f"the prompt is a {type(prompt).__name__}; {_EXPECTED}")
    elif prompt and isinstance(prompt[0], Mapping):
        encode = _tokenizer(tokenizer).encode_chat
        ids = encode([_checked_message(message) for message in prompt], tools=tools)
    else:
        ids = prompt  # type: ignore[assignment]
    if not ids:
        raise RequestError(f"the prompt is empty; {_EXPECTED}")
    if tools and (ids is prompt or _is_array(prompt)):
        raise _untold(tools)
    return ids


def _encode_text(
    text: str, tokenizer: Tokenizer, raw: bool, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    if not raw and tokenizer.chat_template is not None:
        return tokenizer.encode_chat([{"role": "user", "content": text}], tools=tools)
    if tools:
        raise _untold(tools)
    return tokenizer.encode(text)


def _untold(tools: Sequence[Mapping[str, Any]]) -> RequestError:
    return RequestError(
        f"{len(tools)} tools are given with a prompt that no chat template renders; give messages, "
        "or tell the model of them in the prompt and ask for the form of a call by json_schema"
    )


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("this engine has no tokenizer; give the prompt as a list of token ids")
    return tokenizer


def _is_array(prompt: object) -> bool:
    numpy = sys.modules.get("numpy")  # who has made an array has imported it
    return isinstance(prompt, torch.Tensor) or (
        numpy is not None and isinstance(prompt, numpy.ndarray)
    )


def _array_ids(array: Any) -> list[int]:
    """The ids of a numpy array or a torch tensor of integers, of any width."""
    dtype, shape = str(array.dtype), tuple(array.shape)
    if not dtype.removeprefix("torch.").startswith(("int", "uint")) or len(shape) != 1:
        raise RequestError(
            f"the prompt is a {type(array).__name__} of {dtype} with shape {shown(shape)}; "
            f"{_EXPECTED}"
        )
    try:
        return array.tolist()  # type: ignore[no-any-return]
    except RuntimeError as error:  # a tensor without memory, or of a layout that is no list
        raise RequestError(
            f"the prompt's tensor cannot be read ({describe(error)}); give a list of token ids"
        ) from error


def _checked_message(message: Any) -> Message:
    match message:
        case {"role": str(), "content": list() | tuple() as parts}:
            return {**message, "content": "".join(map(_part_text, parts))}
        case {"role": str(), "content": str() | None | Mapping()}:
            return message  # type: ignore[no-any-return]
        case {"role": str(), "content": other}:
            raise RequestError(
                f"the chat holds the content {shown(other)}; give a string, or a list of parts "
                "{'type': 'text', 'text': '...'}"
            )
    raise RequestError(
        f"the chat holds {shown(message)}; each message needs a 'role' (a string) and its 'content'"
    )


def _part_text(part: object) -> str:
    """The text of one of OpenAI's content parts."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind} if kind not in (None, "text"):
            raise RequestError(
                f"the chat holds a content part of type {shown(kind)}; "
                "this engine takes 'text' only"
            )
    raise RequestError(
        f"the chat holds the content part {shown(part)}; expected {{'type': 'text', 'text': '...'}}"
    )
