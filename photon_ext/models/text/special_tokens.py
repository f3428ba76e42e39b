"""SpecialTokens: those of a chat template are tokens, and the same text in a message is text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from photon_ext.errors import RequestError

Given = TypeVar("Given")

# Planes of Unicode whose characters mean nothing; the ends of planes are no characters.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_COMMON = "<>[]/_- "  # in special tokens, and what templates look for in messages


class ChatText(NamedTuple):
    """The text of a conversation, or a part of it.

    Attributes:
        text: as the template gives it.
        marked: the same, but for characters that came from messages and could belong to a special
            token: private ones stand in their place.
    """

    text: str
    marked: str

    def part(self, begin: int, end: int) -> ChatText:
        return ChatText(self.text[begin:end], self.marked[begin:end])


class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        ids: their ids.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token: one for token, one in added.items() if one.special and one.content}
        self._others = {token: one for token, one in added.items() if token not in self._special}
        self.ids = frozenset(self._special)

    def tell_apart(self, given: Given, render: Callable[[Given], str], text: str) -> ChatText:
        """Where the characters of special tokens in `text`, which is `render(given)`, come from.

        `given` is rendered once more with a private character in the place of each that could
        belong to one. If that changes more than these characters, the template looks for them, and
        only those are replaced that do belong to a special token of a message, but not if the
        template's special tokens are others then: it may have made them of what messages hold.

        Raises RequestError: it is nested too deeply, holds all private characters, or as `render`.
        """
        strings = _strings(given)
        possible = self._possible(strings)
        present = {each for each in possible if each in text}
        if not present:
            return ChatText(text, text)
        marks = _marks(present, chain(strings, (text,)))
        marked = _all_marked(given, render, marks)
        if _plain(marked, marks) != text:
            # another text may hold other special tokens
            present |= {each for each in possible if not _telling(each).isalnum()}
            marks = _marks(present, chain(strings, (text,)))
            words = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
            every_marked = _all_marked(given, render, marks)
            marked = _rendered(
                given, render, lambda string: _mark_words(string, words, marks), marks
            )
            if words.findall(marked) != words.findall(every_marked):
                marked = every_marked
        return ChatText(_plain(marked, marks), marked)

    def _possible(self, strings: Iterable[str]) -> set[str]:
        """The special tokens that a string could have given a part of."""
        texts = {each.content for each in self._special.values()}
        telling = set(map(_telling, texts))
        held = {mark for mark in telling if any(mark in string for string in strings)}
        return {each for each in texts if _telling(each) in held}

    def encode(self, chat: ChatText) -> list[int]:
        """Ids of a text, where special tokens that came from a message count as text."""
        (encoding,) = self._backend.encode_batch([chat.text], add_special_tokens=False)
        found = [
            (*place, token)
            for token, place in zip(encoding.ids, encoding.offsets, strict=True)
            if token in self.ids
        ]
        own = [
            (begin, end, token)
            for begin, end, token in found
            if chat.text[begin:end] == chat.marked[begin:end]
        ]
        if len(own) == len(found):
            ids: list[int] = encoding.ids
            return ids
        return self._literal.encode(chat.text, own)

    @cached_property
    def _literal(self) -> _LiteralText:
        return _LiteralText(self._backend, self._special, self._others)


class _LiteralText:
    """Encodes text in which special tokens stand as text, but for those at given places.

    Its tokenizer shares the model of the other one, and knows special tokens by names that nobody
    can guess. So it cuts and joins text around them as the other one does.
    """

    def __init__(
        self, backend: Backend, special: Mapping[int, AddedToken], others: Mapping[int, AddedToken]
    ) -> None:
        self._backend = Backend(backend.model)
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        secret = secrets.token_hex(16)
        self._names = {token: f"\ue000{secret}{token}\ue001" for token in special}
        aliases = {token: _renamed(one, self._names[token]) for token, one in special.items()}
        known = {**others, **aliases}
        self._backend.add_tokens([*known.values()])
        self._ids = {self._backend.token_to_id(one.content): token for token, one in known.items()}
        self._special = special

    def encode(self, text: str, own: Iterable[tuple[int, int, int]]) -> list[int]:
        """`own`: begin, end and id of each place where a special token is meant, in order."""
        pieces, done = [], 0
        for begin, end, token in own:
            pieces += [text[done:begin], self._names[token]]
            done = end
        whole = "".join((*pieces, text[done:]))
        (encoding,) = self._backend.encode_batch_fast([whole], add_special_tokens=False)
        ids: list[int] = []
        for token in encoding.ids:
            known = self._ids.get(token)
            if known is None and token in self._special:  # a word of the model, too
                ids += self._spelled(self._special[token].content)
            else:
                ids.append(token if known is None else known)
        return ids

    def _spelled(self, word: str) -> Iterator[int]:
        model = self._backend.model
        return (part.id for character in word for part in model.tokenize(character))


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _telling(token: str) -> str:
    """The character that tells where a special token comes from."""
    return next((each for each in token if not (each.isalnum() or each in _COMMON)), token[0])


def _marks(tokens: Iterable[str], texts: Iterable[str]) -> dict[str, str]:
    """For each telling character of the tokens a private one that is in none of the texts."""
    taken = set[str]().union(*texts)
    wanted = sorted(set(map(_telling, tokens)))
    private = (mark for mark in map(chr, chain(*_PRIVATE)) if mark not in taken)
    marks = dict(zip(wanted, private, strict=False))
    if len(marks) < len(wanted):
        raise RequestError(
            "the conversation holds all private characters of Unicode and text of special tokens; "
            "leave some out"
        )
    return marks


def _all_marked(given: Given, render: Callable[[Given], str], marks: Mapping[str, str]) -> str:
    every = str.maketrans(dict(marks))
    return _rendered(given, render, lambda string: string.translate(every), marks)


def _rendered(
    given: Given,
    render: Callable[[Given], str],
    change: Callable[[str], str],
    marks: Mapping[str, str],
) -> str:
    try:
        changed = _changed(given, change, {})
    except RecursionError as error:
        raise RequestError(
            "the conversation is nested too deeply; give messages and tools with fewer levels"
        ) from error
    text = render(changed)
    for mark in marks.values():  # as a template writes it that dumps JSON in ASCII
        text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def _plain(marked: str, marks: Mapping[str, str]) -> str:
    return marked.translate({ord(mark): character for character, mark in marks.items()})


def _mark_words(string: str, words: re.Pattern[str], marks: Mapping[str, str]) -> str:
    def marked(match: re.Match[str]) -> str:
        telling = _telling(match[0])
        return match[0].replace(telling, marks[telling], 1)

    return words.sub(marked, string)


def _strings(given: object) -> list[str]:
    """All strings in lists, tuples and mappings, their keys included."""
    return [*_walk(given)]


def _walk(given: object) -> Iterator[str]:
    pending, seen = [given], set[int]()
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, (list, tuple, Mapping)) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(chain(*item.items()) if isinstance(item, Mapping) else item)


def _changed(given: Any, change: Callable[[str], str], done: dict[int, Any]) -> Any:
    """The same with other strings; what stands there twice is made once."""
    if isinstance(given, str):
        return change(given)
    if not isinstance(given, (list, tuple, Mapping)):
        return given
    if id(given) not in done:
        if isinstance(given, Mapping):
            made: Any = {
                _changed(key, change, done): _changed(value, change, done)
                for key, value in given.items()
            }
        else:
            made = [_changed(each, change, done) for each in given]
            made = tuple(made) if isinstance(given, tuple) else made
        done[id(given)] = made
    return done[id(given)]
