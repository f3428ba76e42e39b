"""ThoughtParser: a model's reasoning, told apart from what it says."""

from __future__ import annotations

from photon_ext.serve.http.call_parser import overlap
from photon_ext.serve.http.parts import AnswerParser, Part, Thought

BEGIN, END = "<think>", "</think>"


class ThoughtParser:
    """Text between <think> and </think> at the begin of an answer is a thought; what follows goes
    to another parser. Blanks next to the marks belong to neither.

    Attributes:
        thinking: the answer is within a thought.
    """

    def __init__(self, inner: AnswerParser, thinking: bool) -> None:
        """`thinking`: the prompt ends within a thought."""
        self.thinking = thinking
        self._inner = inner
        self._begun = thinking  # what may stand before a thought is read
        self._stripping = thinking  # blanks at a thought's begin
        self._ended = False
        self._pending = ""

    @property
    def called(self) -> bool:
        return self._inner.called

    @property
    def full(self) -> bool:
        return self._inner.full

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        if not self._begun:
            self._begin()
        if self.thinking:
            self._think(parts)
        if self._begun and not self.thinking:
            self._hand_on(parts)
        return parts

    def finish(self) -> list[Part]:
        rest, self._pending = self._pending, ""
        if self.thinking:
            return [Thought(rest)] if rest.strip() else []
        return [*self._inner.feed(rest), *self._inner.finish()]

    def _begin(self) -> None:
        """Whether a thought begins here, as soon as that is certain."""
        text = self._pending.lstrip()
        if text.startswith(BEGIN):
            self._pending = text[len(BEGIN) :]
            self._begun = self.thinking = self._stripping = True
        elif not BEGIN.startswith(text):
            self._begun = True

    def _think(self, parts: list[Part]) -> None:
        if self._stripping:
            self._pending = self._pending.lstrip()
            self._stripping = not self._pending
        thought, mark, rest = self._pending.partition(END)
        if mark:
            thought, self._pending = thought.rstrip(), rest
            self.thinking, self._ended = False, True
        else:  # a part of the mark, and blanks before it, may be its end
            certain = thought[: len(thought) - overlap(thought, END)].rstrip()
            self._pending, thought = thought[len(certain) :], certain
        if thought:
            parts.append(Thought(thought))

    def _hand_on(self, parts: list[Part]) -> None:
        if self._ended:
            self._pending = self._pending.lstrip()
            if not self._pending:
                return
            self._ended = False
        parts += self._inner.feed(self._pending)
        self._pending = ""
