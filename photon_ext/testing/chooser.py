"""Who decides what runs next: a seeded coin, a fixed list, or the search over all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Chooser(Protocol):
    """Picks one of several possible continuations."""

    def choose(self, options: int) -> int:
        """A number in [0, options).

        Where the host may go on, 0 lets it; the others run one action of a stream.
        """


class Lazy:
    """The slowest device: it runs only while the host waits."""

    def choose(self, options: int) -> int:
        return 0


class Eager:
    """The fastest device: all that was enqueued is done before the host enqueues more."""

    def choose(self, options: int) -> int:
        return options - 1


class Random:
    """A seeded choice at every point."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.choices: list[int] = []

    def choose(self, options: int) -> int:
        choice = int(self._random.random() * options)
        self.choices.append(choice)
        return choice


class Scripted:
    """Plays a list of choices, then always 0; remembers how many options each point had, for the
    search.
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._script = choices
        self.choices: list[int] = []
        self.options: list[int] = []

    def choose(self, options: int) -> int:
        position = len(self.choices)
        choice = self._script[position] if position < len(self._script) else 0
        self.choices.append(choice)
        self.options.append(options)
        return choice
