"""Tokenizer: text to ids and back, from tokenizer.json or the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from photon_ext.errors import ModelError, RequestError, surrogate_in
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.text.chat_options import NO_OPTIONS, ChatOptions
from photon_ext.models.text.chat_template import ChatTemplate, Message
from photon_ext.models.text.detokenizer import Detokenizer
from photon_ext.models.text.open_end import OpenEnd
from photon_ext.models.text.special_tokens import ChatText, SpecialTokens
from photon_ext.models.text.text_files import present, read_json, read_text
from photon_ext.models.text.token_bytes import TokenBytes
from photon_ext.models.text.tokenizer_file import library_errors, read_backend

if TYPE_CHECKING:
    from photon_ext.models.loading.gguf_file import GgufFile

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """Encodes and decodes text.

    Attributes:
        vocab_size: number of ids, added tokens included (the model's vocabulary may be padded
            beyond it).
        bos_id, eos_id: ids of the tokens that begin and end a text, or None.
        chat_template: None where the model has none.
        source: the file, for errors.
    """

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, str], template: str | None, source: str
    ) -> None:
        """`special_tokens`: texts by names such as "eos_token"; `source`: the file, for errors."""
        self._backend = backend
        self.source = source
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._special_id(special_tokens.get("bos_token"))
        self.eos_id = self._special_id(special_tokens.get("eos_token"))
        self._named = dict(special_tokens)
        self.chat_template: ChatTemplate | None = None
        if template:
            self.use_template(template, source)
        self._special = SpecialTokens(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json, and tokenizer_config.json and chat_template.jinja where they exist.

        Raises:
            ModelError: tokenizer.json is missing, or one of the files is damaged; the message names
                it.
        """
        path = directory / TOKENIZER_FILE
        if not present(path):
            raise ModelError(
                f"{path}: no such file; copy the model's {TOKENIZER_FILE} there (older tokenizers "
                "must be converted)"
            )
        backend = read_backend(path)
        config = read_json(directory / _CONFIG_FILE) if present(directory / _CONFIG_FILE) else {}
        return cls(backend, _special_tokens(config), _template(directory, config), str(path))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Builds the tokenizer from the vocabulary and merges in a GGUF file.

        Raises:
            ModelError: the kind of tokenizer is not supported, or the vocabulary or the chat
                template is damaged.
        """
        from photon_ext.models.text.gguf_tokenizer import (
            gguf_backend,
        )  # the package gguf is needed for this format alone

        backend = gguf_backend(file)
        tokens = file.fields.get("tokenizer.ggml.tokens", ())
        special_tokens = {}
        for name in ("bos_token", "eos_token"):
            token_id = file.fields.get(f"tokenizer.ggml.{name}_id")
            if isinstance(token_id, int) and 0 <= token_id < len(tokens):
                special_tokens[name] = tokens[token_id]
        template = ConfigReader(file.fields, str(file.path)).text("tokenizer.chat_template")
        return cls(backend, special_tokens, template, str(file.path))

    def use_template(self, template: str, source: str) -> None:
        """Conversations are written by this chat template from here on. Raises ModelError, naming
        `source`: it is broken.
        """
        self.chat_template = ChatTemplate(template, self._named, source)

    def most_characters(self, tokens: int) -> int | None:
        """A text of more characters is sure to be more tokens than these. None: that cannot be
        told, as any number of characters may be one unknown word, or some may be dropped.
        """
        backend = self._backend
        is_kept = isinstance(backend.model, models.BPE) and backend.model.unk_token is None
        is_kept = is_kept and isinstance(backend.decoder, decoders.ByteLevel)
        if not is_kept or not isinstance(backend.normalizer, normalizers.NFC | None):
            return None
        longest = max(map(len, backend.get_vocab()), default=1)
        together = 1 if backend.normalizer is None else 4  # characters that NFC makes one
        return tokens * longest * together

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, behind the begin-of-text token if the model uses one.

        `add_special_tokens`: False leaves that out. A text that brings it along, such as a template
        has made, gets no second one.

        Raises:
            RequestError: the text cannot be written in UTF-8, or the tokenizer fails on it.
        """
        _check_unicode(text)
        with library_errors(
            RequestError, f"{self.source}: the tokenizer fails on this text; try another one"
        ):
            # in a batch, as a text alone is encoded under Python's lock, and all others wait
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = batch[0].ids
        doubled = add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id] * 2
        return ids[1:] if doubled else ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: ChatOptions = NO_OPTIONS,
    ) -> list[int]:
        """Ids of a conversation, ready for the answer. Raises: as `chat_text`."""
        return self.encode_part(self.chat_text(messages, add_generation_prompt, options))

    def encode_part(self, chat: ChatText) -> list[int]:
        """Ids of a conversation's text or of a part of it, without a begin-of-text token: templates
        write that themselves. Raises as `encode`.
        """
        if chat.marked == chat.text:
            return self.encode(chat.text, add_special_tokens=False)
        with library_errors(
            RequestError, f"{self.source}: the tokenizer fails on this text; try another one"
        ):
            return self._special.encode(chat)

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: ChatOptions = NO_OPTIONS,
        check_length: Callable[[int], None] = lambda characters: None,
    ) -> ChatText:
        """The text of a conversation, with its special tokens. With `continue_final_message` it
        ends where the last message does, as long as that has a text. `check_length` may raise for
        a text of so many characters, before more is done with it.

        Raises:
            RequestError: there is no chat template, the template refuses the messages or fails, or
                they are no list (or other sequence).
        """
        if self.chat_template is None:
            raise RequestError(
                f"{self.source} has no chat template; send a plain prompt instead of messages"
            )
        if messages is not None and (
            not isinstance(messages, Sequence)
            or isinstance(messages, (str, bytes, bytearray, memoryview))
        ):
            raise RequestError(
                f"the conversation is a {type(messages).__name__}; "
                f"expected a list of messages such as [{{'role': 'user', 'content': 'text'}}]"
            )
        for message in (
            messages or ()
        ):  # where a character stands is told before the template puts other text around it
            for value in (
                message.values() if isinstance(message, Mapping) else ()
            ):  # what is no message the template refuses
                if isinstance(value, str):
                    _check_unicode(value)
        if not options.continue_final_message:
            return self._rendered(messages, add_generation_prompt, options, check_length)
        end = OpenEnd(messages)

        def check_without_mark(characters: int) -> None:
            check_length(characters - end.added)

        return end.cut(self._rendered(end.messages, False, options, check_without_mark))

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        options: ChatOptions,
        check_length: Callable[[int], None],
    ) -> ChatText:
        template = self.chat_template
        assert template is not None

        def render(given: tuple[Any, ...]) -> str:
            messages, tools, kwargs = given
            return template.render(messages, add_generation_prompt, tools, kwargs)

        given = messages, options.tools, options.template_kwargs
        text = render(given)
        check_length(len(text))
        if options.special_tokens_in_messages:
            return ChatText(text, text)
        return self._special.tell_apart(given, render, text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no character become U+FFFD, ids without a token nothing.

        Raises:
            OverflowError: an id is negative, or 2**32 or more.
            RequestError: the tokenizer fails on these ids.
        """
        with library_errors(
            RequestError, f"{self.source}: the tokenizer fails on these {len(ids)} ids"
        ):
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, shown: Collection[int] = ()
    ) -> Detokenizer:
        """A streaming decoder for one sequence. `shown`: ids of special tokens whose names are in
        the text, although others are skipped.
        """
        hidden = self._special.ids.difference(shown) if skip_special_tokens else frozenset()

        def left_out(token: int) -> bool:
            return token in hidden or self._backend.id_to_token(token) is None

        return Detokenizer(self._backend, skip_special_tokens and not shown, left_out)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for, see TokenBytes."""
        return self._token_bytes.of(token)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, for other libraries."""
        text: str = self._backend.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text in the vocabulary, such as "<|im_end|>", or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def ids_without_token(self, vocab: int) -> list[int]:
        """Of a model's `vocab` ids those that this tokenizer has no token for: models have more
        rows than tokens, so that sizes are round.
        """
        name = self._backend.id_to_token
        return [token for token in range(vocab) if name(token) is None]

    def _special_id(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)


def _check_unicode(text: str) -> None:
    surrogate = surrogate_in(text)
    if surrogate is not None:  # perhaps a byte of a command line that is not UTF-8
        raise RequestError(f"the prompt holds {surrogate}; give valid Unicode text")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries of tokenizer_config.json that name a token.

    Each is a text, or an object with its text as `content`.
    """
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the entry in tokenizer_config.json.

    Of several named templates it is the default one.
    """
    path = directory / _TEMPLATE_FILE
    if present(path):
        return read_text(path)
    fields, entries = (
        ConfigReader(config, str(directory / _CONFIG_FILE)),
        config.get("chat_template"),
    )
    if not isinstance(entries, list):
        return fields.text("chat_template")
    if not all(
        isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in entries
    ):
        fields.refuse(
            "chat_template", "a text, or a list of objects with a 'name' and a 'template'"
        )
    return next(
        (str(entry["template"]) for entry in entries if entry.get("name") == "default"), None
    )
