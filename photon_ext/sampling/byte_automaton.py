"""From a pattern to the smallest automaton over bytes that accepts its texts in UTF-8."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from photon_ext.sampling.pattern import (
    Characters,
    Either,
    Joined,
    NotRegular,
    Pattern,
    Repeated,
    TooSlow,
    byte_sequences,
)

NO_STATE = -1


class AutomatonLimits(NamedTuple):
    """What an automaton may take; a form that needs more is kept on the host.

    Attributes:
        states: of the automaton over bytes.
        parts: of its pattern, with all repetitions written out.
        size: bytes of its tables on the device.
        seconds: to make it.
    """

    states: int = 4096
    parts: int = 50_000
    size: int = 16 * 2**20
    seconds: float = 3.0


class ByteAutomaton(NamedTuple):
    """A deterministic automaton; state 0 is the start.

    Attributes:
        classes: uint8 [256], the class of each byte; bytes of a class go the same ways.
        transitions: int32 [states, classes]; NO_STATE: none.
        accepting: bool [states]: the text may end here.
    """

    classes: npt.NDArray[np.uint8]
    transitions: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]


def byte_automaton(pattern: Pattern, limits: AutomatonLimits, deadline: float) -> ByteAutomaton:
    """The smallest automaton of a pattern. Raises NotRegular: it is beyond the limits, is not made
    at `deadline`, in seconds of `time.monotonic`, or there is no text that it accepts.
    """
    nodes = _Nodes(limits.parts)
    begin = nodes.new()
    end = nodes.put(pattern, begin)
    found = _determined(nodes, begin, end, limits.states, deadline)
    return _smallest(_useful(found, deadline), deadline)


class _Nodes:
    """An automaton with free moves, and more than one move for a byte."""

    def __init__(self, most: int) -> None:
        self.free: list[list[int]] = []
        self.moves: list[list[tuple[int, int, int]]] = []  # first byte, last byte, where to
        self._most = most

    def new(self) -> int:
        if len(self.free) >= self._most:
            raise NotRegular(f"it has more than {self._most} parts")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def put(self, pattern: Pattern, begin: int) -> int:
        """Adds a pattern behind a node; returns the node behind it."""
        if isinstance(pattern, Characters):
            return self._put_characters(pattern, begin)
        if isinstance(pattern, Joined):
            for part in pattern.parts:
                begin = self.put(part, begin)
            return begin
        if isinstance(pattern, Either):
            end = self.new()
            for part in pattern.parts:
                own = self.new()
                self.free[begin].append(own)
                self.free[self.put(part, own)].append(end)
            return end
        return self._put_repeated(pattern, begin)

    def _put_characters(self, pattern: Characters, begin: int) -> int:
        end = self.new()
        for first, last in pattern.ranges:
            for sequence in byte_sequences(first, last):
                node = begin
                for low, high in sequence[:-1]:
                    after = self.new()
                    self.moves[node].append((low, high, after))
                    node = after
                self.moves[node].append((*sequence[-1], end))
        return end

    def _put_repeated(self, pattern: Repeated, begin: int) -> int:
        for _ in range(pattern.least):
            after = self.put(pattern.part, begin)
            if after == begin:  # of an empty text one is as good as many
                break
            begin = after
        end = self.new()
        self.free[begin].append(end)
        if pattern.most is None:
            again = self.new()
            self.free[end].append(again)
            self.free[self.put(pattern.part, again)].append(end)
            return end
        for _ in range(pattern.most - pattern.least):
            own = self.new()
            self.free[begin].append(own)
            begin = self.put(pattern.part, own)
            self.free[begin].append(end)
        return end

    def closed(self, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes, and all that free moves reach from there."""
        pending, found = list(nodes), set(nodes)
        while pending:
            for after in self.free[pending.pop()]:
                if after not in found:
                    found.add(after)
                    pending.append(after)
        return frozenset(found)

    def targets(self, state: Iterable[int], class_of: list[int]) -> list[set[int]]:
        """By class of bytes, the nodes that moves lead to."""
        found: list[set[int]] = [set() for _ in range(class_of[-1] + 1)]
        for node in state:
            for low, high, after in self.moves[node]:
                for index in range(class_of[low], class_of[high] + 1):
                    found[index].add(after)
        return found

    def byte_classes(self) -> npt.NDArray[np.uint8]:
        """Bytes that no move tells apart are of one class."""
        begins = np.zeros(257, np.bool_)
        for moves in self.moves:
            for low, high, _ in moves:
                begins[low] = begins[high + 1] = True
        begins[0] = False
        return np.cumsum(begins[:256]).astype(np.uint8)


def _determined(nodes: _Nodes, begin: int, end: int, most: int, deadline: float) -> ByteAutomaton:
    classes = nodes.byte_classes()
    count = int(classes[-1]) + 1
    class_of = classes.tolist()
    start = nodes.closed([begin])
    numbers, pending, rows = {start: 0}, [start], []
    closures: dict[frozenset[int], frozenset[int]] = {}
    for state in pending:  # which grows meanwhile
        check_time(deadline)
        row = []
        for target in nodes.targets(state, class_of):
            if not target:
                row.append(NO_STATE)
                continue
            key = frozenset(target)
            if (found := closures.get(key)) is None:
                found = closures[key] = nodes.closed(key)
            if found not in numbers:
                if len(numbers) >= most:
                    raise NotRegular(f"its automaton has more than {most} states")
                numbers[found] = len(numbers)
                pending.append(found)
            row.append(numbers[found])
        rows.append(row)
    accepting = np.array([end in state for state in numbers], np.bool_)
    return ByteAutomaton(classes, np.array(rows, np.int32).reshape(len(rows), count), accepting)


def check_time(deadline: float) -> None:
    """Raises TooSlow where it is past, on `time.monotonic`."""
    if time.monotonic() > deadline:
        raise TooSlow("it takes too long to compile for the device")


def _smallest(automaton: ByteAutomaton, deadline: float) -> ByteAutomaton:
    """The same with equivalent states made one: those that accept alike, and go to equivalent
    states. What tells states apart is mixed into one number each, and is looked at again at the
    end.
    """
    classes, transitions, accepting = automaton
    weights = np.random.default_rng(0).integers(1, 2**62, transitions.shape[1] + 1, dtype=np.int64)
    labels, found = accepting.astype(np.int64), 0
    while True:
        check_time(deadline)
        after = np.append(labels, -1)[transitions]
        with np.errstate(over="ignore"):
            mixed = after @ weights[:-1] + labels * weights[-1]
        _, firsts, labels = np.unique(mixed, return_index=True, return_inverse=True)
        if len(firsts) == found:
            break
        found = len(firsts)
    order = np.argsort(firsts)  # the start stays the first
    rank = np.empty(found, np.int64)
    rank[order] = np.arange(found)
    merged = np.append(rank[labels], NO_STATE)[transitions]
    firsts = firsts[order]
    if not (merged == merged[firsts][rank[labels]]).all():
        raise NotRegular("its automaton could not be made smaller")
    return ByteAutomaton(classes, merged[firsts].astype(np.int32), accepting[firsts])


def _useful(automaton: ByteAutomaton, deadline: float) -> ByteAutomaton:
    """The same without states that lead to no end."""
    classes, transitions, accepting = automaton
    useful = accepting.copy()
    while True:
        check_time(deadline)
        more = useful | np.append(useful, False)[transitions].any(axis=1)
        if (more == useful).all():
            break
        useful = more
    if not useful[0]:
        raise NotRegular("no text matches it")
    numbers = np.append(np.where(useful, np.cumsum(useful) - 1, NO_STATE), NO_STATE)
    return ByteAutomaton(classes, numbers[transitions[useful]].astype(np.int32), accepting[useful])
