"""Texts that are not sampled: those of one token by their ids, which are logit biases; those of
several by a constraint of the host, which forbids the last behind the others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from photon_ext.sampling.constraints import Constraint, is_finished


class BadWords(NamedTuple):
    """What a request's bad words come to.

    Attributes:
        ids: never sampled.
        sequences: of two tokens and more, none of which is one of `ids`; never sampled in a row.
    """

    ids: frozenset[int]
    sequences: frozenset[tuple[int, ...]]

    @classmethod
    def of(cls, words: Iterable[str], encode: Callable[[str], Iterable[int]]) -> BadWords:
        """Of texts alone and behind a space."""
        forms = {tuple(encode(text)) for word in words for text in (word, " " + word)}
        ids = frozenset(form[0] for form in forms if len(form) == 1)
        longer = (form for form in forms if len(form) > 1 and ids.isdisjoint(form))
        return cls(ids, frozenset(longer))


class WithoutSequences:
    """Leaves the last token of each sequence out, where the answer ends with the others. What is
    left is any token, or what another constraint allows.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]], inner: Constraint | None) -> None:
        """`inner`: the other constraint; None: there is none."""
        self.inner = inner
        self._endings: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        longest = 0
        for *begin, last in sequences:
            self._endings[begin[-1]].append((tuple(begin), last))
            longest = max(longest, len(begin))
        self._answer: deque[int] = deque(maxlen=longest)

    @property
    def finished(self) -> bool:
        return self.inner is not None and is_finished(self.inner)

    def advance(self, token: int) -> None:
        self._answer.append(token)
        if self.inner is not None:
            self.inner.advance(token)

    def fill_bitmask(self, words: memoryview) -> None:
        if self.inner is not None:
            self.inner.fill_bitmask(words)
        else:
            words.cast("B")[:] = b"\xff" * words.nbytes
        for token in self._forbidden():
            if token >> 5 < len(words):
                place = token & 31
                words[token >> 5] &= ~(1 << place if place < 31 else -(1 << 31))

    def _forbidden(self) -> set[int]:
        answer = tuple(self._answer)
        endings = self._endings.get(answer[-1], ()) if answer else ()
        return {last for begin, last in endings if answer[-len(begin) :] == begin}
