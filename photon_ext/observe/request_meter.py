"""RequestMeter: how long requests took, as histograms, counted where they end.

A step costs nothing here, and a request's end some microseconds. Bounds are vLLM's, so that its
dashboards and alerts hold here, and finer ones below them: a step may take half a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple, TypeAlias

_FIRST_TOKEN = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

BOUNDS: dict[str, tuple[float, ...]] = {
    "first_token_s": _FIRST_TOKEN,
    "between_tokens_s": _TOKEN,
    "token_s": _TOKEN,
    "whole_s": _REQUEST,
    "queue_s": _REQUEST,
    "prefill_s": _REQUEST,
    "decode_s": _REQUEST,
    "in_row_s": _REQUEST,
    "prompt_tokens": _TOKENS,
    "tokens": _TOKENS,
}
"""Upper bounds of the buckets of each histogram; a last bucket has what is above them all."""

_RECENT = 16
Counts: TypeAlias = "tuple[list[int], float]"
"""How many values lie in each bucket, and the sum of them all."""


class Life(NamedTuple):
    """A request that has ended; times are seconds of `time.perf_counter`.

    Attributes:
        reason: why, see Output.
        submitted, admitted, first, ended: when it was submitted, got its first row, its first
            token, and its end; None: it never did.
        prompt_tokens, tokens: of its prompt and of its answer.
    """

    reason: str
    submitted: float
    admitted: float | None
    first: float | None
    ended: float
    prompt_tokens: int
    tokens: int


class RequestMeter:
    """Counts requests by the engine thread; any thread may read.

    Attributes:
        recent_row_s: seconds for which a request has a row, lately: a moving average over 16; 0
            before one has ended.
    """

    def __init__(self) -> None:
        self.recent_row_s = 0.0
        self._rows = 0
        self._ends: dict[str, int] = {}
        self._counts = {name: [0] * (len(bounds) + 1) for name, bounds in BOUNDS.items()}
        self._sums = dict.fromkeys(BOUNDS, 0.0)

    def add(self, life: Life) -> None:
        """A request has ended. What it never came to is not counted; nor is the time between
        tokens, where it had one.
        """
        reason, submitted, admitted, first, ended, prompt_tokens, tokens = life
        self._ends[reason] = self._ends.get(reason, 0) + 1
        count = self._count
        count("whole_s", ended - submitted)
        count("prompt_tokens", prompt_tokens)
        count("tokens", tokens)
        count("queue_s", (ended if admitted is None else admitted) - submitted)
        if admitted is None:
            return
        row_s = ended - admitted
        count("in_row_s", row_s)
        self._rows += 1
        self.recent_row_s += (row_s - self.recent_row_s) / min(self._rows, _RECENT)
        if first is None:
            return
        count("first_token_s", first - submitted)
        count("prefill_s", first - admitted)
        count("decode_s", ended - first)
        if tokens > 1:
            mean = (ended - first) / (tokens - 1)
            count("token_s", mean)
            count("between_tokens_s", mean, tokens - 1)

    def _count(self, name: str, value: float, times: int = 1) -> None:
        self._counts[name][bisect_left(BOUNDS[name], value)] += times
        self._sums[name] += value * times

    def ends(self) -> dict[str, int]:
        """How many requests have ended, by why."""
        return self._ends.copy()

    def histograms(self) -> dict[str, Counts]:
        """By name, see BOUNDS."""
        return {name: (counts.copy(), self._sums[name]) for name, counts in self._counts.items()}
