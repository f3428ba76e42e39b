"""Texts: a model's tokenizer and chat template, asked from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from photon_ext.errors import RequestError
from photon_ext.models.text.chat_options import NO_OPTIONS, ChatOptions
from photon_ext.models.text.length_limit import LengthLimit
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.serve.http.errors import too_long

Result = TypeVar("Result")

_SHORT = 4096  # characters that are encoded on the event loop itself, within about a millisecond
_TAIL = 64


class ChatPrompt(NamedTuple):
    """
    Attributes:
        ids: of the conversation.
        tail: the end of its text, which says what an answer begins within.
    """

    ids: tuple[int, ...]
    tail: str


class Texts:
    """
    Attributes:
        tokenizer: the model's.
        max_len: tokens of the context.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        self._limit = LengthLimit(tokenizer, max_len)
        self._threads = ThreadPoolExecutor(2, "photon-text")

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text as it stands. Raises ApiError, RequestError: too long, or no text."""

        def encoded() -> tuple[int, ...]:
            self._check_length(len(text), "prompt")
            return tuple(self.tokenizer.encode(text, add_special_tokens))

        return self.checked(await self.run(len(text), encoded), "prompt")

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions = NO_OPTIONS,
        add_generation_prompt: bool = True,
        size: int = 0,
    ) -> ChatPrompt:
        """A conversation, rendered and encoded. `size`: about how many characters it has. Raises
        ApiError, RequestError: too long, or the template refuses it.
        """

        def encoded() -> ChatPrompt:
            check = partial(self._check_length, param="messages")
            chat = self.tokenizer.chat_text(messages, add_generation_prompt, options, check)
            return ChatPrompt(tuple(self.tokenizer.encode_part(chat)), chat.text[-_TAIL:])

        found = await self.run(size, encoded)
        self.checked(found.ids, "messages")
        return found

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Raises RequestError."""
        return await self.run(4 * len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens))

    def checked(self, ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        """A prompt that the context holds. Raises ApiError."""
        if len(ids) > self.max_len:
            raise too_long(
                f"{param} has {len(ids)} tokens, and the context holds {self.max_len}; shorten it",
                param,
            )
        return ids

    @cached_property
    def speaks_of_developers(self) -> bool:
        """Whether the chat template knows the role "developer"."""
        template = self.tokenizer.chat_template
        return template is not None and template.names("developer")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Work on a text of about so many characters: here, or on another thread. Errors do not
        name the files of this server.
        """
        try:
            if size <= _SHORT:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RequestError as error:
            told = str(error)
            for source in self._sources:
                told = told.removeprefix(f"{source}: ")
            raise RequestError(told) from error

    @cached_property
    def _sources(self) -> tuple[str, ...]:
        template = self.tokenizer.chat_template
        return (self.tokenizer.source, *(() if template is None else (template.source,)))

    def _check_length(self, characters: int, param: str) -> None:
        """Raises ApiError for a text that is sure to be too long."""
        try:
            self._limit.check(characters)
        except RequestError as error:
            raise too_long(str(error), param) from error
