"""What callers may send as a prompt, and how it becomes token ids and embeddings."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from photon_ext.checks import as_index, is_array
from photon_ext.engine.embeds import EmbedsReader, PromptEmbeds, shape_of
from photon_ext.errors import RequestError, describe, shown

if TYPE_CHECKING:
    import numpy as np

    from photon_ext.models.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = (
    "str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | torch.Tensor "
    "| np.ndarray[Any, Any]"
)

_EXPECTED = (
    "give a string, a list or one-dimensional array of token ids, a list of chat messages "
    "({'role': ..., 'content': ...}), or {'prompt_embeds': ...}"
)
_PARTS = "give a tensor [n, hidden], or a list of parts, each such a tensor, a text, or token ids"


class EncodedPrompt(NamedTuple):
    """Token ids, 0 where an embedding stands; whether the model has them is not asked."""

    ids: Sequence[int]
    embeds: PromptEmbeds | None = None


class _Builder:
    """A prompt of several parts, in order."""

    def __init__(self, reader: EmbedsReader) -> None:
        self.ids: list[int] = []
        self._reader = reader
        self._rows: list[torch.Tensor] = []
        self._positions: list[int] = []

    def add(self, embeds: Any) -> None:
        """Embeddings [n, hidden]."""
        rows = self._reader.read(embeds, len(self._positions))
        self._positions += range(len(self.ids), len(self.ids) + len(rows))
        self.ids += [0] * len(rows)
        self._rows.append(rows)

    def encoded(self) -> EncodedPrompt:
        if not self._rows:
            return EncodedPrompt(self.ids)
        rows = self._reader.gathered(self._rows)
        return EncodedPrompt(self.ids, PromptEmbeds.of(rows, self._positions))


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    reader: EmbedsReader,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> EncodedPrompt:
    """A prompt's tokens and embeddings, as they are given or encoded.

    A string is one user message where the model has a chat template, unless `raw`; otherwise it is
    encoded as it stands, behind the model's begin-of-text token if it uses one. Token ids are taken
    from a sequence, a numpy array or a torch tensor, which is read from its device.

    The content of a chat message is a text, or a list of OpenAI's parts, of which texts are joined;
    a part {"type": "embeds", "embeds": ...} is embeddings, {"type": "image", "image": ...} an image
    for the encoder. {"prompt_embeds": ...} is embeddings, or a list of parts: embeddings, texts as
    they stand, token ids. `tools` are told by the chat template.

    Raises RequestError: the prompt is empty, of no known form, holds parts that it cannot hold, has
    tools and no chat template that tells them, or needs a tokenizer that is not there.
    """
    found = EncodedPrompt(())
    if isinstance(prompt, str):
        if prompt:
            found = EncodedPrompt(_encode_text(prompt, _tokenizer(tokenizer), raw, tools))
    elif is_array(prompt):
        found = EncodedPrompt(_array_ids(prompt))
    elif isinstance(prompt, Mapping):
        found = _encode_parts(prompt, tokenizer, reader)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(f"the prompt is a {type(prompt).__name__}; {_EXPECTED}")
    elif prompt and isinstance(prompt[0], Mapping):
        found = _encode_chat(prompt, _tokenizer(tokenizer), reader, tools)
    else:
        found = EncodedPrompt(prompt)  # type: ignore[arg-type]
    if not found.ids:
        raise RequestError(f"the prompt is empty; {_EXPECTED}")
    if tools and not _is_told(prompt):
        raise _untold(tools)
    return found


def characters_in(prompt: Prompt) -> int:
    """Of the texts of a prompt of any form; of a chat those of its users alone, as templates leave
    out parts of earlier answers.
    """
    if isinstance(prompt, str):
        return len(prompt)
    texts: object = ()
    if isinstance(prompt, Mapping):
        texts = prompt.get("prompt_embeds")
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        texts = [text for message in prompt for text in _user_texts(message)]
    if not isinstance(texts, (list, tuple)):
        return 0
    return sum(len(text) for text in texts if isinstance(text, str))


def _user_texts(message: object) -> list[Any]:
    match message:
        case {"role": "user", "content": str(text)}:
            return [text]
        case {"role": "user", "content": list() | tuple() as parts}:
            return [part.get("text") for part in parts if isinstance(part, Mapping)]
    return []


def _is_told(prompt: Prompt) -> bool:
    """Whether the prompt is a text or messages, which a template may render."""
    is_chat = isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping)
    return isinstance(prompt, str) or is_chat


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


def _array_ids(array: Any) -> list[int]:
    """The ids of a numpy array or a torch tensor of integers, of any width."""
    dtype, shape = str(array.dtype), shape_of(array)
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


# --- with embeddings ------------------------------------------------------------------------------


def _encode_parts(
    prompt: Mapping[str, Any], tokenizer: Tokenizer | None, reader: EmbedsReader
) -> EncodedPrompt:
    if set(prompt) != {"prompt_embeds"}:
        raise RequestError(f"the prompt is {shown(prompt)}; {_EXPECTED}")
    parts = prompt["prompt_embeds"]
    if is_array(parts):
        parts = [parts]
    if not isinstance(parts, (list, tuple)):
        raise RequestError(f"prompt_embeds is a {type(parts).__name__}; {_PARTS}")
    builder = _Builder(reader)
    for index, part in enumerate(parts):
        if isinstance(part, str):  # a begin-of-text token goes before a text that begins the prompt
            builder.ids += _tokenizer(tokenizer).encode(part, add_special_tokens=index == 0)
        elif is_array(part) and "float" in str(part.dtype):
            builder.add(part)
        elif is_array(part):
            builder.ids += _array_ids(part)
        elif isinstance(part, (list, tuple)):
            builder.ids += part
        elif as_index(part) is not None:
            builder.ids.append(part)
        else:
            raise RequestError(f"prompt_embeds holds {shown(part)}; {_PARTS}")
    return builder.encoded()


def _encode_chat(
    messages: Sequence[Any],
    tokenizer: Tokenizer,
    reader: EmbedsReader,
    tools: Sequence[Mapping[str, Any]],
) -> EncodedPrompt:
    """Embeddings go through the template as marks that no text holds."""
    marks: dict[str, Any] = {}
    checked = [_checked_message(message, marks) for message in messages]
    if not marks:
        return EncodedPrompt(tokenizer.encode_chat(checked, tools=tools))
    builder = _Builder(reader)
    pieces = re.split(f"({'|'.join(marks)})", tokenizer.chat_text(checked, tools=tools))
    if pieces[1::2] != [*marks]:
        raise RequestError(
            "the chat template drops, repeats or moves the embeddings of these messages; put them "
            "into user messages, or give {'prompt_embeds': ...}"
        )
    for piece in pieces:
        if piece in marks:
            part = marks[piece]
            builder.add(part["embeds"] if "embeds" in part else reader.read_image(part["image"]))
        elif piece:
            builder.ids += tokenizer.encode(piece, add_special_tokens=False)
    return builder.encoded()


def _checked_message(message: Any, marks: dict[str, Any]) -> Message:
    """A message whose content is one text; embeddings in it become new `marks`."""
    match message:
        case {"role": str(), "content": list() | tuple() as parts}:
            return {**message, "content": "".join(_part_text(part, marks) for part in parts)}
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


def _part_text(part: object, marks: dict[str, Any]) -> str:
    """The text of one of OpenAI's content parts, or the mark of embeddings."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "embeds", "embeds": embeds} if is_array(embeds):
            return _marked({"embeds": embeds}, marks)
        case {"type": "image", "image": image}:
            return _marked({"image": image}, marks)
        case {"type": kind} if kind not in (None, "text", "embeds", "image"):
            raise RequestError(
                f"the chat holds a content part of type {shown(kind)}; "
                "this engine takes 'text', 'embeds' and 'image'"
            )
    raise RequestError(
        f"the chat holds the content part {shown(part)}; expected {{'type': 'text', 'text': '...'}}"
        ", {'type': 'embeds', 'embeds': tensor}, or {'type': 'image', 'image': image}"
    )


def _marked(part: dict[str, Any], marks: dict[str, Any]) -> str:
    mark = f"embeds-{secrets.token_hex(16)}"
    marks[mark] = part
    return mark
