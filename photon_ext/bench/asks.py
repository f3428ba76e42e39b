"""What is asked of a server: lengths, prompts, and when each request is due."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any, NamedTuple

from photon_ext.errors import ConfigError, shown

SIGMA = 0.9  # of lognormal lengths
_LENGTHS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?::(\d{1,9}))?")
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")


class Lengths(NamedTuple):
    """Tokens, uniform from `low` to `high`; with a `median` lognormal, and cut to those."""

    low: int
    high: int
    median: int | None = None

    @classmethod
    def of(cls, name: str, text: str) -> Lengths:
        """Of "160", "32-1024" or "16-2048:160". ConfigError: it is none of these."""
        found = _LENGTHS.fullmatch(text)
        low, high, median = map(int, found.groups("0")) if found else (0, 0, 0)
        high = high or low
        if not 1 <= low <= (median or low) <= high:
            raise ConfigError(
                f"{name} is {shown(text)}; give tokens as 160, 32-1024 (any of these alike) or "
                "16-2048:160 (lognormal, with that median)"
            )
        return cls(low, high, median or None)

    def draw(self, choose: Random) -> int:
        if self.median is None:
            return choose.randint(self.low, self.high)
        drawn = round(choose.lognormvariate(math.log(self.median), SIGMA))
        return min(max(drawn, self.low), self.high)


class Ask(NamedTuple):
    """One request: its prompt, ids or text; how many tokens it is to get; and when it is due,
    seconds from the begin, where requests arrive by the clock.
    """

    prompt: list[int] | str
    answer: int
    due_s: float = 0.0


class Traffic(NamedTuple):
    """What requests look like.

    Attributes:
        prompt, answer: tokens of each.
        ids: prompts are random ids from here; None: they are words, as many as there were to be
            tokens.
        seed: the same one gives the same requests.
    """

    prompt: Lengths
    answer: Lengths
    ids: tuple[int, int] | None
    seed: int = 0

    def asks(self, count: int, rate: float | None = None, run: int = 0) -> list[Ask]:
        """So many of them, at `rate` per second with the distances of a Poisson process; None: all
        are due at once. Runs of other numbers have other prompts.
        """
        choose, clock = Random(f"{self.seed} {run}"), Random(f"arrivals {self.seed} {run}")
        found, due_s = [], 0.0
        for _ in range(count):
            if rate is not None:
                due_s += clock.expovariate(rate)
            prompt = self._prompt(choose, self.prompt.draw(choose))
            found.append(Ask(prompt, self.answer.draw(choose), due_s))
        return found

    def _prompt(self, choose: Random, length: int) -> list[int] | str:
        if self.ids is None:
            return " ".join(choose.choice(_WORDS) for _ in range(length))
        low, high = self.ids
        return [choose.randrange(low, high) for _ in range(length)]


class Endpoint(NamedTuple):
    """Where requests go, and what they say besides their prompt.

    Attributes:
        url: of the server, without a path: "http://localhost:8000".
        model: as the server names it.
        chat: /v1/chat/completions, one user message; else /v1/completions.
        api_key: sent as a bearer token; None: none is.
        exact: answers are to be as long as asked, by `ignore_eos` and `min_tokens`, which not all
            servers know.
    """

    url: str
    model: str
    chat: bool = False
    api_key: str | None = None
    exact: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Of a streamed, greedy request that is told its usage."""
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.answer,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact:
            asked |= {"ignore_eos": True, "min_tokens": ask.answer}
        if self.chat:
            return asked | {"messages": [{"role": "user", "content": ask.prompt}]}
        return asked | {"prompt": ask.prompt}
