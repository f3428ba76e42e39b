"""What callers may send as a prompt, and how it becomes token ids and embeddings."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from photon_ext.checks import as_index, is_array
from photon_ext.engine.embeds import EmbedsReader, PromptEmbeds, shape_of
from photon_ext.errors import RequestError, describe, shown
from photon_ext.models.text.chat_options import NO_OPTIONS, ChatOptions
from photon_ext.models.text.length_limit import LengthLimit

if TYPE_CHECKING:
    import numpy as np

    from photon_ext.models.text.special_tokens import ChatText
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


@dataclass(frozen=True)
class PromptEncoder:
    """Makes prompts of what callers send; usable from any thread.

    Attributes:
        tokenizer: None takes token ids only.
        reader: says which embeddings a prompt may have.
        max_len: tokens of the context.
    """

    tokenizer: Tokenizer | None
    reader: EmbedsReader
    max_len: int

    def encode(
        self, prompt: Prompt, raw: bool = False, options: ChatOptions = NO_OPTIONS
    ) -> EncodedPrompt:
        """A prompt's tokens and embeddings, as they are given or encoded.

        A string is one user message where the model has a chat template, unless `raw`; otherwise it
        is encoded as it stands, behind the model's begin-of-text token if it uses one. Token ids
        are taken from a sequence, a numpy array or a torch tensor, which is read from its device.

        The content of a chat message is a text, or a list of OpenAI's parts. Text parts are
        joined; a part {"type": "embeds", "embeds": ...} is embeddings, {"type": "image", "image":
        ...} an image for the encoder. {"prompt_embeds": ...} is embeddings, or a list of parts:
        embeddings, texts as they stand, token ids. `options` are for the chat template.

        Raises RequestError: the prompt is empty, sure to be too long, of no known form, holds parts
        that it cannot hold, comes with options and without a template that reads them, or needs a
        tokenizer that is not there.
        """
        found = EncodedPrompt(())
        if isinstance(prompt, str):
            if prompt:
                found = self._encode_text(prompt, raw, options)
        elif is_array(prompt):
            found = EncodedPrompt(_array_ids(prompt))
        elif isinstance(prompt, Mapping):
            found = self._encode_parts(prompt)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise RequestError(f"the prompt is a {type(prompt).__name__}; {_EXPECTED}")
        elif prompt and isinstance(prompt[0], Mapping):
            found = self._encode_chat(prompt, options)
        else:
            found = EncodedPrompt(prompt)  # type: ignore[arg-type]
        if not found.ids:
            raise RequestError(f"the prompt is empty; {_EXPECTED}")
        if options.needs_template is not None and not _is_told(prompt):
            raise _untold(options)
        return found

    def _encode_text(self, text: str, raw: bool, options: ChatOptions) -> EncodedPrompt:
        tokenizer = self._tokenizer
        if not raw and tokenizer.chat_template is not None:
            if options.continue_final_message:
                raise RequestError(
                    "continue_final_message is True, and the prompt is a string; give messages of "
                    "which the last is to be continued"
                )
            return self._encode_chat([{"role": "user", "content": text}], options)
        if options.needs_template is not None:
            raise _untold(options)
        self._limit.check(len(text))
        return EncodedPrompt(tokenizer.encode(text))

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer; give the prompt as a list of token ids"
            )
        return self.tokenizer

    @cached_property
    def _limit(self) -> LengthLimit:
        return LengthLimit(self._tokenizer, self.max_len)

    def _encode_chat(self, messages: Sequence[Any], options: ChatOptions) -> EncodedPrompt:
        """Embeddings go through the template as marks that no text holds."""
        marks: dict[str, Any] = {}
        checked = [_checked_message(message, marks) for message in messages]
        tokenizer = self._tokenizer
        chat = tokenizer.chat_text(checked, options=options, check_length=self._limit.check)
        if not marks:
            return EncodedPrompt(tokenizer.encode_part(chat))
        found = [*re.finditer("|".join(marks), chat.text)]
        if [match[0] for match in found] != [*marks]:
            raise RequestError(
                "the chat template drops, repeats or moves the embeddings of these messages; put "
                "them into user messages, or give {'prompt_embeds': ...}"
            )
        builder, done = _Builder(self.reader), 0
        for match in found:
            self._add_text(builder, chat.part(done, match.start()))
            part, done = marks[match[0]], match.end()
            is_image = "image" in part
            builder.add(self.reader.read_image(part["image"]) if is_image else part["embeds"])
        self._add_text(builder, chat.part(done, len(chat.text)))
        return builder.encoded()

    def _add_text(self, builder: _Builder, part: ChatText) -> None:
        if part.text:
            builder.ids += self._tokenizer.encode_part(part)

    def _encode_parts(self, prompt: Mapping[str, Any]) -> EncodedPrompt:
        if set(prompt) != {"prompt_embeds"}:
            raise RequestError(f"the prompt is {shown(prompt)}; {_EXPECTED}")
        parts = prompt["prompt_embeds"]
        if is_array(parts):
            parts = [parts]
        if not isinstance(parts, (list, tuple)):
            raise RequestError(f"prompt_embeds is a {type(parts).__name__}; {_PARTS}")
        texts = [part for part in parts if isinstance(part, str)]
        if texts:
            self._limit.check(sum(map(len, texts)))
        builder = _Builder(self.reader)
        for index, part in enumerate(parts):
            if isinstance(part, str):  # a begin-of-text token goes before a text that begins it all
                builder.ids += self._tokenizer.encode(part, add_special_tokens=index == 0)
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


def _is_told(prompt: Prompt) -> bool:
    """Whether the prompt is a text or messages, which a template may render."""
    is_chat = isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping)
    return isinstance(prompt, str) or is_chat


def _untold(options: ChatOptions) -> RequestError:
    return RequestError(
        f"{options.needs_template} given with a prompt that no chat template renders; give "
        "messages, or write into the prompt what a template would"
    )


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


# --- messages ----------------------------------------------------------------------------------


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
