"""What is asked, and when: named loads with their lengths, and arrivals by the clock."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

SIGMA = 0.9  # of lognormal lengths
LEAST_ANSWER = 3  # tokens, however small the scale
LARGE_VOCABULARY, TEXT_IDS = 100_000, (1_000, 100_000)  # there ids of text, none of control


class Lengths(NamedTuple):
    """Tokens, uniform from `low` to `high`; with a `median` lognormal, and cut to those."""

    low: int
    high: int
    median: float | None = None

    def draw(self, choose: Random) -> int:
        if self.median is None:
            return choose.randint(self.low, self.high)
        drawn = round(choose.lognormvariate(math.log(self.median), SIGMA))
        return min(max(drawn, self.low), self.high)

    def scaled(self, scale: float, least: int) -> Lengths:
        low, high = (max(least, round(scale * bound)) for bound in (self.low, self.high))
        return Lengths(low, high, self.median and scale * self.median)


class Load(NamedTuple):
    """What requests look like.

    Attributes:
        prompt, answer: tokens of each; with a prefix or turns, the new ones of the prompt.
        prefix: tokens that all prompts begin with. Such requests are not by the clock: each comes
            once the one before it has its first token.
        turns: of a chat. A turn comes once the answer before it is complete, and its prompt is all
            that was said, then the new tokens.
        most: requests of a run at most; None: any number.
    """

    prompt: Lengths
    answer: Lengths
    prefix: int = 0
    turns: int = 1
    most: int | None = None

    @property
    def clocked(self) -> bool:
        """Whether a rate means something."""
        return not self.prefix

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.prefix + self.turns * (self.prompt.high + self.answer.high)

    def scaled(self, scale: float) -> Load:
        return self._replace(
            prompt=self.prompt.scaled(scale, 1),
            answer=self.answer.scaled(scale, LEAST_ANSWER),
            prefix=round(scale * self.prefix),
        )


LOADS = {
    "short": Load(Lengths(500, 500), Lengths(3, 3)),
    "chat": Load(Lengths(16, 2048, 160), Lengths(8, 1024, 160)),
    "long": Load(Lengths(4096, 16384), Lengths(16, 128)),
    "mix": Load(Lengths(32, 1024), Lengths(32, 256)),
    "shared": Load(Lengths(32, 32), Lengths(32, 32), prefix=2000, most=64),
    "turns": Load(Lengths(32, 256), Lengths(32, 128), turns=4),
}


class Ask(NamedTuple):
    """One request.

    Attributes:
        prompt: token ids; of a later turn the new ones.
        answer: tokens to generate.
        due_s: when it arrives, seconds from the begin; of no meaning with `after`.
        after: the request that it waits for; None: it arrives by the clock.
        whole: whether it waits for that one's end, and goes on with its prompt and answer; else
            for its first token.
        turn: of a chat, from 1 on; with a common prefix 1 for the first and 2 for all others.
    """

    prompt: list[int]
    answer: int
    due_s: float
    after: int | None
    whole: bool
    turn: int


def make_asks(
    load: Load, requests: int, rate: float | None, vocabulary: int, seed: int
) -> list[Ask]:
    """`requests` of a load, at `rate` per second (of chats, where there are turns) with the
    distances of a Poisson process; None: all at once. The same arguments give the same, and
    another rate the same prompts and answers."""
    choose, clock = Random(seed), Random(f"arrivals {seed}")
    ids = TEXT_IDS if vocabulary > LARGE_VOCABULARY else (0, vocabulary)

    def tokens(count: int) -> list[int]:
        return [choose.randrange(*ids) for _ in range(count)]

    prefix, due_s, asks = tokens(load.prefix), 0.0, []
    for index in range(min(requests, load.most or requests)):
        place = index if load.prefix else index % load.turns
        if place == 0 and rate is not None:
            due_s += clock.expovariate(rate)
        prompt = prefix + tokens(load.prompt.draw(choose))
        answer = load.answer.draw(choose)
        after, turn = index - 1 if place else None, 1 + min(place, max(load.turns - 1, 1))
        asks.append(Ask(prompt, answer, due_s, after, load.turns > 1, turn))
    return asks
