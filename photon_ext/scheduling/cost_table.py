"""What steps cost, as measured: how many prompt tokens may be scheduled beside decode rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

SLOWDOWN = 2.0  # a mixed step takes at most this many times as long as its decode rows alone
SPARING_SLOWDOWN = 2.5  # the same, where a larger budget lowers the total delay of the rows
SPARING = 0.9  # lower: delay per prompt token is at most this part of the next smaller budget's
SLACK = 1.25  # or this many times as long as with the smallest budget, where that is more
WEIGHT = 1 / 8  # of a new measurement in the smoothed time
DOUBT = 1 / 128  # of the expected time in a stale estimate, at each step
MARGIN = 0.02  # of the decode step: how far below the limit a stale estimate decays

Rows: TypeAlias = Hashable
"""Decode rows whose steps take the same: how many (a bucket), and what their graphs do besides."""


class CostTable:
    """Times of steps by decode rows and prompt tokens (a prefill budget, or 0).

    A budget is allowed where any of these holds:

    - A mixed step takes at most SLOWDOWN (or what the caller asks for) times as long as the decode
      step of the same rows.
    - It takes at most SLACK times as long as with the smallest budget: mixing itself has a price,
      which may be most of what the smallest budget costs.
    - It takes at most SPARING_SLOWDOWN times as long as the decode step, and the delay per prompt
      token (the time beyond the decode step) falls to SPARING of the next smaller budget's.

    Each bucket begins with the smallest budget, and tries the next one when that is allowed. A
    budget that turns out too slow costs one slow step, and is tried again after many others.

    Attributes:
        shares: the prefill budgets (numbers of prompt tokens) to choose from, ascending.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self._us: dict[tuple[Rows, int], float] = {}

    def add(self, rows: Rows, tokens: int, us: float) -> None:
        """A step of these decode rows and prompt tokens has taken `us`. Ignored, unless the
        prompt tokens are 0 or a whole budget.
        """
        if tokens and tokens not in self.shares:
            return
        known = self._us.get((rows, tokens), us)
        slower = tokens and us > known  # counts in full
        self._us[rows, tokens] = us if slower else known + WEIGHT * (us - known)
        if tokens:
            self._bound_smaller(rows, tokens)
            self._doubt(rows, tokens)

    def allowed(self, rows: Rows, slowdown: float = SLOWDOWN) -> int:
        """The largest budget that is allowed beside these decode rows, where a mixed step may take
        `slowdown` times as long as they do alone; at least the smallest.
        """
        alone, best = self._alone(rows), self.shares[0]
        if alone is None:  # known once two budgets are measured
            return self.shares[:2][-1] if (rows, best) in self._us else best
        for share in self.shares[1:]:
            us, longest = self._us.get((rows, share)), self._longest(rows, alone, best, slowdown)
            if longest is None or (us is not None and us > longest):
                break
            best = share
        return best

    def _bound_smaller(self, rows: Rows, share: int) -> None:
        """Fewer tokens take no longer. So one slow step with a budget that is not used any more
        does not count for ever.
        """
        us = self._us[rows, share]
        for smaller in self.shares:
            if smaller < share and self._us.get((rows, smaller), us) > us:
                self._us[rows, smaller] = us

    def _doubt(self, rows: Rows, share: int) -> None:
        """The next larger budget is not measured while it is forbidden, so its estimate is stale.
        The estimate decays toward the time expected from this budget, or toward a little less than
        the limit, and is dropped once it is within the limit.
        """
        alone, larger = self._alone(rows), self._next(share)
        known = self._us.get((rows, larger)) if larger else None
        if alone is None or known is None:  # as nearly always
            return
        longest = self._longest(rows, alone, share)
        if longest is None or known <= longest:
            return
        expected = alone + (self._us[rows, share] - alone) * larger / share
        self._us[rows, larger] = known + DOUBT * (min(expected, longest - MARGIN * alone) - known)
        if self._us[rows, larger] <= longest:
            del self._us[rows, larger]

    def _next(self, share: int) -> int:
        """The next larger budget; 0: there is none."""
        return next((size for size in self.shares if size > share), 0)

    def _alone(self, rows: Rows) -> float | None:
        """The time of the rows' decode step; where none was measured, that of 0 prompt tokens,
        extrapolated from the two smallest budgets. None: these are not measured either.
        """
        measured = self._us.get((rows, 0))
        if measured is not None or len(self.shares) < 2:
            return measured
        less, more = self.shares[:2]
        shorter, longer = self._us.get((rows, less)), self._us.get((rows, more))
        if shorter is None or longer is None:
            return None
        return shorter - max(longer - shorter, 0.0) * less / (more - less)

    def _longest(
        self, rows: Rows, alone: float, share: int, slowdown: float = SLOWDOWN
    ) -> float | None:
        """How long a step with the budget above `share` may take; None: `share` is not measured."""
        us = self._us.get((rows, share))
        if us is None:
            return None
        limit = max(slowdown * alone, SLACK * self._us.get((rows, self.shares[0]), 0.0))
        sparing = alone + SPARING * (us - alone) * self._next(share) / share
        return max(limit, min(sparing, SPARING_SLOWDOWN * alone))
