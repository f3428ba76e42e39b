"""Texts that are not sampled: those of one token by their ids, which are logit biases; those of
several by a constraint of the host, which forbids the last behind the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from photon_ext.sampling.constraints import Constraint, is_finished
from photon_ext.sampling.sequence_automaton import SequenceAutomaton


@dataclass(frozen=True)
class BadWords:
    """What a request's bad words come to.

    Attributes:
        ids: never sampled.
        sequences: of two tokens and more, without one of `ids`; never sampled in a row.
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

    @cached_property
    def endings(self) -> Endings:
        """Of the sequences, for all answers to a prompt."""
        return Endings(self.sequences)


class Endings:
    """Which tokens may not follow: the last of each sequence, where the answer ends with the
    others. It never changes, so answers may share one.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        """`sequences`: of two tokens at least."""
        lasts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *begin, last in sequences:
            lasts[tuple(begin)].append(last)
        self.begins = SequenceAutomaton(lasts)
        self._lasts = {self._state_of(begin): np.array(ids) for begin, ids in lasts.items()}

    def _state_of(self, begin: tuple[int, ...]) -> int:
        state = 0
        for token in begin:
            state = self.begins.after(state, token)
        return state

    def forbid(self, state: int, words: memoryview) -> None:
        """Takes the bits of tokens that may not follow `state` of `begins` out of a mask."""
        found = [self._lasts[end] for end in self.begins.ends(state)]
        if not found:
            return
        tokens, mask = np.concatenate(found), np.frombuffer(words, np.uint8)
        bits = np.unpackbits(mask, bitorder="little")
        bits[tokens[tokens < len(bits)]] = 0
        mask[:] = np.packbits(bits, bitorder="little")


class WithoutSequences:
    """Leaves the last token of each sequence out, where the answer ends with the others. What is
    left is any token, or what another constraint allows.
    """

    def __init__(self, endings: Endings, inner: Constraint | None) -> None:
        """`inner`: the other constraint; None: there is none."""
        self.inner = inner
        self._endings = endings
        self._state = 0

    @property
    def finished(self) -> bool:
        return self.inner is not None and is_finished(self.inner)

    def advance(self, token: int) -> None:
        self._state = self._endings.begins.after(self._state, token)
        if self.inner is not None:
            self.inner.advance(token)

    def fill_bitmask(self, words: memoryview) -> None:
        if self.inner is not None:
            self.inner.fill_bitmask(words)
        else:
            words.cast("B")[:] = b"\xff" * words.nbytes
        self._endings.forbid(self._state, words)
