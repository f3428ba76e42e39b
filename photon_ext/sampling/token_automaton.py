"""An automaton over tokens, as the device reads it (csrc/common/automaton.h): for each state of an
automaton over bytes a mask of the tokens that may follow. The next state is found by walking the
bytes of the token that was sampled.

The masks are those of the host's matcher, state by state, so that an answer does not depend on
where its form is kept. They are compared with those that the automaton has: where the matcher
allows a token that leads nowhere here, or forbids one although several bytes may follow, the form
is kept on the host. (Where one byte alone may follow, the matcher allows only the longest tokens.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from photon_ext.layout import AUTOMATON_HEADER, AutomatonWord, VocabularyWord
from photon_ext.sampling.byte_automaton import NO_STATE, AutomatonLimits, ByteAutomaton, check_time
from photon_ext.sampling.pattern import NotRegular

if TYPE_CHECKING:
    import torch

END_TOKEN = -1
ACCEPTING, COMPLETE, MASK_SHIFT = 1, 2, 2
LONGEST_TOKEN = 255
_ALIGNMENT = 4  # words: 16 bytes
_DIFFERS = "the host's matcher allows other tokens than its automaton"

Words = npt.NDArray[np.int32]


class TokenBytes:
    """The bytes of all tokens of a vocabulary, in columns for walking all of them at once.

    Attributes:
        size: width of the logits.
        end_ids: tokens that end an answer where it may end.
        tokens: bytes by id; empty: never allowed.
        order: ids of all tokens, the longest first. counts, columns: how many have a byte at a
            place, from 0 on, and these bytes, in this order.
        ids: int32, a mask of all ids.
        words: the same as `tables`, for who needs no torch.
    """

    def __init__(
        self, tokens: Sequence[bytes], end_ids: Iterable[int], pinned: bool = False
    ) -> None:
        """`tokens`: as above; those of more than LONGEST_TOKEN bytes are never allowed either.
        `pinned`: where tables are kept, those of automata too: CUDA copies from there.
        """
        self.size = len(tokens)
        self.pinned = pinned
        self.end_ids = tuple(end_ids)
        self.tokens = [b"" if len(token) > LONGEST_TOKEN else token for token in tokens]
        for token in self.end_ids:
            self.tokens[token] = b""
        lengths = np.array([len(token) for token in self.tokens])
        self.order = np.argsort(-lengths, kind="stable")
        self.counts = [int((lengths > at).sum()) for at in range(lengths.max(initial=0))]
        by_length = [self.tokens[i] for i in self.order.tolist()]
        self.columns = [
            np.array([token[at] for token in by_length[:count]], np.uint8)
            for at, count in enumerate(self.counts)
        ]
        ids = np.arange(-(-self.size // 32) * 32) < self.size
        self.ids: Words = np.packbits(ids, bitorder="little").view(np.int32)
        self.words = self._table(lengths)
        if pinned:  # which takes its time: now
            _ = self.tables

    @cached_property
    def tables(self) -> torch.Tensor:
        """int32, what the device reads (layout.VocabularyWord)."""
        return _tensor(self.words, self.pinned)

    def _table(self, lengths: npt.NDArray[np.int64]) -> Words:
        begins = np.cumsum(lengths) - lengths
        places = (begins << 8 | lengths).astype(np.int32)
        places[list(self.end_ids)] = END_TOKEN
        header = np.zeros(len(VocabularyWord), np.int32)
        header[VocabularyWord.TOKENS] = self.size
        header[VocabularyWord.BYTES] = len(header) + self.size
        return _joined([header, places, _packed(b"".join(self.tokens))])


class Matcher(Protocol):
    """The host's matcher at one point of an answer."""

    def deep_copy(self) -> Matcher:
        """Another at the same point."""

    def consume_token(self, token: int) -> bool:
        """Goes on behind a token."""

    def compute_bitmask(self) -> bytes:
        """The tokens that may follow."""

    def is_stopped(self) -> bool:
        """Whether nothing may follow."""

    def is_error(self) -> bool:
        """Whether it has failed."""


class StateMasks(NamedTuple):
    """The masks of an automaton's states.

    Attributes:
        masks: int32 [masks, words], those that differ.
        mask_of: int64, which of them each state has; negative: no token leads there.
    """

    masks: Words
    mask_of: npt.NDArray[np.int64]


class TokenAutomaton:
    """An automaton over the tokens of a vocabulary, on the host; immutable.

    Attributes:
        by_bytes: the automaton over bytes.
        vocabulary: the tokens.
        words: the same as `tables`, for who needs no torch.
        masks, mask_of: see StateMasks.
        complete: bool, of each state: nothing may follow.
    """

    def __init__(
        self,
        automaton: ByteAutomaton,
        vocabulary: TokenBytes,
        limits: AutomatonLimits,
        matcher: Matcher | None = None,
        masks: StateMasks | None = None,
    ) -> None:
        """`matcher`: at the start of an answer; None: the masks are the automaton's own. `masks`:
        what this found before. Raises NotRegular: it takes more than the limits allow, or is not
        the matcher's.
        """
        self.by_bytes = automaton
        self.vocabulary = vocabulary
        self._by_byte = automaton.transitions[:, automaton.classes]
        self._ways = (self._by_byte != NO_STATE).sum(axis=1)
        self.complete = automaton.accepting & (self._ways == 0)
        self.masks, self.mask_of = masks or self._find_masks(limits, matcher)
        self.words = self._words()
        if self.words.nbytes > limits.size:
            raise NotRegular(_too_large(limits))
        if vocabulary.pinned:
            _ = self.tables

    def accepts(self, state: int) -> bool:
        """Whether the answer may end in this state."""
        return bool(self.by_bytes.accepting[state])

    def advance(self, state: int, token: int) -> int:
        """The state behind a token; NO_STATE: it is not allowed."""
        if token in self.vocabulary.end_ids:
            return state if self.accepts(state) else NO_STATE
        classes, transitions, _ = self.by_bytes
        text = self.vocabulary.tokens[token] if 0 <= token < self.vocabulary.size else b""
        for byte in text:
            if state != NO_STATE:
                state = int(transitions[state, classes[byte]])
        return state if text else NO_STATE

    def state_after(self, tokens: Iterable[int]) -> int:
        """The state behind an answer's tokens; NO_STATE: they are none of its answers'."""
        state = 0
        for token in tokens:
            state = NO_STATE if state == NO_STATE else self.advance(state, token)
        return state

    def _find_masks(self, limits: AutomatonLimits, matcher: Matcher | None) -> StateMasks:
        """Walks from the start to all states that tokens lead to."""
        deadline = time.monotonic() + limits.seconds
        mask_of = np.full(len(self.complete), -1, np.int64)
        known: dict[bytes, int] = {}
        found: list[Words] = []
        pending, reached = [(0, matcher)], {0}
        while pending:
            check_time(deadline)
            state, own = pending.pop()
            after = self._all_after(state)
            mask = self._mask(state, after)
            if own is not None:
                mask = self._checked_mask(state, mask, own)
            index = known.setdefault(mask.tobytes(), len(found))
            if index == len(found):
                found.append(mask)
                if mask.nbytes * len(found) > limits.size:
                    raise NotRegular(_too_large(limits))
            mask_of[state] = index
            after[~_bits(mask)[self.vocabulary.order[: len(after)]]] = NO_STATE
            for target, first in zip(*np.unique(after, return_index=True), strict=True):
                if target == NO_STATE or int(target) in reached:
                    continue
                reached.add(int(target))
                pending.append((int(target), self._behind(own, int(first))))
        return StateMasks(np.stack(found), mask_of)

    def _behind(self, matcher: Matcher | None, place: int) -> Matcher | None:
        """The matcher behind a token, which is named by its place in the vocabulary's order."""
        if matcher is None:
            return None
        other = matcher.deep_copy()
        other.consume_token(int(self.vocabulary.order[place]))
        return other

    def _mask(self, state: int, after: npt.NDArray[np.int32]) -> Words:
        """The automaton's own mask of a state, as int32 words."""
        allowed = np.zeros(-(-self.vocabulary.size // 32) * 32, np.bool_)
        allowed[self.vocabulary.order[: len(after)][after != NO_STATE]] = True
        if self.accepts(state):
            allowed[list(self.vocabulary.end_ids)] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _checked_mask(self, state: int, mask: Words, matcher: Matcher) -> Words:
        """The matcher's mask of a state, whose own mask is given."""
        if self.complete[state]:
            if not matcher.is_stopped():
                raise NotRegular(_DIFFERS)
            return mask
        theirs = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(mask)]
        theirs = theirs & self.vocabulary.ids  # its tokenizer may have more than the model
        forced = self._ways[state] == 1 and not self.accepts(state)
        fits = not (theirs & ~mask).any() and (forced or (theirs == mask).all())
        if matcher.is_error() or matcher.is_stopped() or not theirs.any() or not fits:
            raise NotRegular(_DIFFERS)
        return theirs

    def _all_after(self, state: int) -> npt.NDArray[np.int32]:
        """The states behind all tokens that have bytes, in the vocabulary's order."""
        counts, columns = self.vocabulary.counts, self.vocabulary.columns
        ways = self._by_byte
        after: npt.NDArray[np.int32] = ways[state][columns[0]]
        alive = np.flatnonzero(after != NO_STATE)
        for count, column in zip(counts[1:], columns[1:], strict=True):
            alive = alive[: np.searchsorted(alive, count)]
            after[alive] = ways[after[alive], column[alive]]
            alive = alive[after[alive] != NO_STATE]
        return after

    @cached_property
    def tables(self) -> torch.Tensor:
        """int32, what the device reads (layout.AutomatonWord)."""
        return _tensor(self.words, self.vocabulary.pinned)

    def _words(self) -> Words:
        classes, transitions, accepting = self.by_bytes
        header = np.zeros(AUTOMATON_HEADER, np.int32)
        header[AutomatonWord.STATES], header[AutomatonWord.CLASSES] = transitions.shape
        header[AutomatonWord.MASKS], header[AutomatonWord.MASK_WORDS] = self.masks.shape
        states = np.maximum(self.mask_of, 0) << MASK_SHIFT
        states |= accepting * ACCEPTING | self.complete * COMPLETE
        parts = [_packed(classes.tobytes()), states.astype(np.int32), transitions.reshape(-1)]
        table = _joined([header, *parts])
        table[AutomatonWord.MASKS_BEGIN] = len(table)
        table = _joined([table, self.masks.reshape(-1)])
        table[AutomatonWord.SIZE] = len(table)
        return table


def _too_large(limits: AutomatonLimits) -> str:
    return f"its tables take more than {limits.size / 2**20:.1f} MiB"


def _tensor(words: Words, pinned: bool) -> torch.Tensor:
    import torch  # a compiler of automata for other processes needs none

    tensor = torch.from_numpy(words)
    return tensor.pin_memory() if pinned else tensor


def _bits(mask: Words) -> npt.NDArray[np.bool_]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)


def _packed(data: bytes) -> Words:
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)


def _joined(parts: list[Words]) -> Words:
    """One after the other, filled up to whole vectors."""
    whole = np.concatenate(parts)
    return np.concatenate([whole, np.zeros(-len(whole) % _ALIGNMENT, np.int32)])
