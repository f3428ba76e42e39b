"""Constraints that ask the host which tokens may come next.

The mask for position p is asked for after the token at p - 1 is committed, while the forward that
makes the logits is already running.

A bitmask is a row of int32 words: bit (id & 31) of word (id >> 5) set means that the token is
allowed. It arrives all zero: a constraint that forgets to write allows nothing, which ends its
request with an error. `set_ids(words, ids)` sets the bits of ids; by hand mind that the words are
signed, and a memoryview takes no `1 << 31`. Or write through `numpy.frombuffer(words,
numpy.uint32)`. Bits from the vocabulary's end on count for nothing.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import index
from typing import Protocol, runtime_checkable

from photon_ext.checks import as_index, as_tuple
from photon_ext.errors import ConfigError, RequestError, shown


@runtime_checkable
class Constraint(Protocol):
    """State of one constrained request. Called by the engine thread only; an exception ends that
    request alone, with an error.

    A constraint serves one request at a time. If it has a method `fresh()`, which returns one in
    its start state, every request takes a fresh one, so that a SamplingParams may serve many. The
    thread that submits calls `fresh()`, and hears of what it raises as RequestError. While the
    engine thread is in here no other request goes on; to wait for one of them is a RequestError.
    """

    @property
    def finished(self) -> bool:
        """True once the request is complete: it ends with finish reason "stop". A property or an
        attribute, not a method. Read after each `advance`, so a request has at least one token.
        """

    def advance(self, token: int) -> None:
        """Takes the token that was sampled. Not called for the stop token that ends a request."""

    def fill_bitmask(self, words: memoryview) -> None:
        """Sets the bits of the allowed tokens in `words` (int32, zeroed, ceil(vocab / 32) of them;
        see `set_ids`). Called once before each token, the first included. The words are
        read when it returns; a view that is kept reaches no later mask.
        """


def constraint_fault(value: object) -> str | None:
    """Why `value` is no Constraint, and what to do; None if it is one. Nothing of it is called:
    `finished` may compute.
    """
    names = ("advance", "fill_bitmask", "finished")
    *methods, finished = (inspect.getattr_static(value, name, None) for name in names)
    if isinstance(value, type) or None in (*methods, finished):
        return (
            "give an object with advance(token), fill_bitmask(words) and finished, for instance "
            "what from_callable(...) returns"
        )
    if callable(finished) or isinstance(finished, classmethod):
        return "its finished is a method, which always counts as true; make it a property"
    return None


def is_finished(constraint: Constraint) -> bool:
    """Whether the request is complete. Raises RequestError where `finished` is a method, which
    `constraint_fault` does not see where a property or __slots__ hold it.
    """
    finished = constraint.finished
    if callable(finished):
        found = f"{shown(finished)}, which always counts as true"
        raise RequestError(f"finished is {found}; make it a property")
    return bool(finished)


def set_ids(words: memoryview, ids: Iterable[int]) -> None:
    """Allows these token ids besides those that a mask allows already.

    Args:
        words: a mask as `fill_bitmask` and the `fill` of `Pipeline.finalize` get it: int32,
            contiguous.
        ids: the ids.

    Raises:
        RequestError: (a ValueError) an id has no bit in the mask, or is no integer.
    """
    bits, limit = words.cast("B"), 32 * len(words)
    for token in _as_ids(ids):
        if not 0 <= token < limit:
            raise RequestError(
                f"constraint allows token id {shown(token)}; the mask covers ids 0 to {limit - 1}"
            )
        bits[token >> 3] |= 1 << (token & 7)


def pack_ids(ids: Iterable[int], num_words: int) -> array[int]:
    """Token ids as int32 words. Raises as `set_ids`."""
    words = array("i", bytes(4 * num_words))
    set_ids(memoryview(words), ids)
    return words


class AllowedIds:
    """Allows `positions[i]` at the i-th generated token, or `positions[0]` always if `repeat`."""

    def __init__(self, positions: Sequence[Collection[int]], repeat: bool) -> None:
        self._positions = positions
        self._repeat = repeat
        self._done = 0
        self._packed: dict[tuple[int, int], array[int]] = {}  # by position and number of words

    @property
    def finished(self) -> bool:
        return not self._repeat and self._done >= len(self._positions)

    def advance(self, token: int) -> None:
        self._done += 1

    def fill_bitmask(self, words: memoryview) -> None:
        position = 0 if self._repeat else self._done
        key = position, len(words)
        if key not in self._packed:
            self._packed[key] = pack_ids(self._positions[position], len(words))
        words[:] = memoryview(self._packed[key])

    def fresh(self) -> AllowedIds:
        other = AllowedIds(self._positions, self._repeat)
        other._packed = self._packed  # shared: the words depend on the key alone
        return other


class CallableConstraint:
    """Asks a function of the tokens so far for the ids that may come next."""

    def __init__(
        self,
        allowed: Callable[[list[int]], Iterable[int]],
        done: Callable[[list[int]], bool] | None,
    ) -> None:
        self._allowed = allowed
        self._done = done
        self._tokens: list[int] = []

    @property
    def finished(self) -> bool:
        return self._done is not None and bool(self._done(list(self._tokens)))

    def advance(self, token: int) -> None:
        self._tokens.append(token)

    def fill_bitmask(self, words: memoryview) -> None:
        words[:] = memoryview(pack_ids(self._allowed(list(self._tokens)), len(words)))

    def fresh(self) -> CallableConstraint:
        return CallableConstraint(self._allowed, self._done)


def from_allowed_ids(allowed: Collection[int] | Sequence[Collection[int]]) -> AllowedIds:
    """A constraint from ids: either ids that are allowed at every position, or one collection of
    ids per position; then the request is finished (with "stop") after the last. It has `fresh()`:
    one serves many requests. An id beyond the mask's words ends a request with an error.

    Raises:
        ConfigError: the two forms are mixed, or something is not a token id.
    """
    items = as_tuple(allowed)
    if items is None:
        raise ConfigError(
            f"from_allowed_ids: got a {type(allowed).__name__}; give token ids, or one collection "
            "of token ids per position"
        )
    if all(map(_is_id, items)):
        return AllowedIds((frozenset(map(index, items)),), repeat=True)
    positions = []
    for number, item in enumerate(items):
        ids = as_tuple(item)
        if ids is None or not all(map(_is_id, ids)):
            raise ConfigError(
                f"from_allowed_ids: item {number} is {shown(item)}; give only token ids (>= 0), or "
                "only collections of token ids"
            )
        positions.append(frozenset(map(index, ids)))
    return AllowedIds(tuple(positions), repeat=False)


def from_callable(
    allowed: Callable[[list[int]], Iterable[int]],
    finished: Callable[[list[int]], bool] | None = None,
) -> CallableConstraint:
    """A constraint from a function: `allowed(tokens so far)` returns the ids that may come next.

    `finished(tokens so far)`, called after each token, ends the request with "stop" where it is
    true. Both are called by the engine thread, with a list of their own. What they raise, and an id
    that the mask has no bit for, ends the request with an error. It has `fresh()`: one serves many
    requests.

    Raises:
        ConfigError: one of the two is no function.
    """
    if not callable(allowed) or (finished is not None and not callable(finished)):
        raise ConfigError("from_callable: give functions that take the list of generated token ids")
    return CallableConstraint(allowed, finished)


def _is_id(value: object) -> bool:
    number = as_index(value)
    return number is not None and number >= 0


def _as_ids(values: object) -> Iterator[int]:
    """What a constraint allows, as integers. Raises RequestError where it is something else."""
    entries = as_tuple(values)
    if entries is None:
        raise RequestError(f"constraint allows {shown(values)}; give a list of token ids")
    try:
        yield from map(index, entries)
    except TypeError as error:
        odd = next(entry for entry in entries if as_index(entry) is None)
        told = f"constraint allows {shown(odd)}, which is no token id; give integers"
        raise RequestError(told) from error
