"""Parts: what an answer of a chat consists of, and the parser that tells them apart."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias


class Said(NamedTuple):
    """Text for the reader."""

    text: str


class Thought(NamedTuple):
    """Text of a model's reasoning."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool begins.

    Attributes:
        call: which one of the answer, from 0 on.
    """

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON of a call's arguments."""

    call: int
    text: str


Part: TypeAlias = Said | Thought | CallBegun | CallArguments


class AnswerParser(Protocol):
    """Tells parts apart in an answer that comes in pieces. However it is cut, the parts are the
    same, but for where their texts are cut.

    Attributes:
        thinking: what comes next is a thought, as far as that is known.
        called: a call has begun.
        full: nothing that follows is wanted.
    """

    @property
    def thinking(self) -> bool: ...

    @property
    def called(self) -> bool: ...

    @property
    def full(self) -> bool: ...

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this piece."""

    def finish(self) -> list[Part]:
        """The rest, once nothing follows."""


class PlainText:
    """All of the answer is said."""

    thinking = called = full = False

    def feed(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []
