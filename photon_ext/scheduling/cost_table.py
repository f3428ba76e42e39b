"""What steps cost, as measured: how many prompt tokens may be scheduled beside decode rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

SLOWDOWN = 2.0  # of a mixed step: so many times as long as its decode rows alone, at most
SPARING_SLOWDOWN = 2.5  # the same, where a share spares the rows time
SPARING = 0.9  # of what a prompt token takes beyond the rows with the share below, at most
SLACK = 1.25  # times as long as the smallest share, where that is more
WEIGHT = 1 / 8  # of a measurement in a smoothed time
DOUBT = 1 / 128  # of an expectation in a time that is not measured any more
MARGIN = 0.02  # of the decode step, by which what is doubted heads below what is allowed

Rows: TypeAlias = Hashable
"""Decode rows whose steps take the same: how many (a bucket), and what their graphs do besides."""


class CostTable:
    """Times of steps by decode rows and prompt tokens (a share, or 0).

    A share is allowed where it keeps a mixed step within so many times the decode step of the same
    rows (SLOWDOWN, or what is asked). Mixing itself has a price, which may be most of what the
    smallest share takes. So those shares are allowed, too, which take hardly longer than that one,
    within SLACK; and up to SPARING_SLOWDOWN a share that spares the rows time in all: a prompt
    takes fewer steps, and each of its tokens less of what steps take beyond their rows, SPARING of
    it at most.

    Each bucket begins with the smallest share, and tries the next one when that is allowed. A share
    that turns out too slow is one slow step, and is tried again after many others.

    Attributes:
        shares: the numbers of prompt tokens to choose from, ascending.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self._us: dict[tuple[Rows, int], float] = {}

    def add(self, rows: Rows, tokens: int, us: float) -> None:
        """A step of these decode rows and prompt tokens has taken `us`; only none and full shares
        tell anything.
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
        """The largest share with which a step of so many decode rows takes at most `slowdown` times
        as long as they do alone, or one that spares them time; at least the smallest.
        """
        alone, best = self._alone(rows), self.shares[0]
        if alone is None:  # two shares will tell
            return self.shares[:2][-1] if (rows, best) in self._us else best
        for share in self.shares[1:]:
            us, longest = self._us.get((rows, share)), self._longest(rows, alone, best, slowdown)
            if longest is None or (us is not None and us > longest):
                break
            best = share
        return best

    def _bound_smaller(self, rows: Rows, share: int) -> None:
        """Fewer tokens take no longer: so one slow step with a share that is not used any more does
        not count for ever.
        """
        us = self._us[rows, share]
        for smaller in self.shares:
            if smaller < share and self._us.get((rows, smaller), us) > us:
                self._us[rows, smaller] = us

    def _doubt(self, rows: Rows, share: int) -> None:
        """What is known of the next larger share is not measured again while it is forbidden: it
        gives way to what is to be expected, or a little less than is allowed, and is forgotten once
        it would be allowed.
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
        """The next larger share; 0: there is none."""
        return next((size for size in self.shares if size > share), 0)

    def _alone(self, rows: Rows) -> float | None:
        """The time of the rows' decode step; where prompts never left room for one, what the two
        smallest shares leave for no prompt tokens at all.
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
        """How long a step with the share above `share` may take; None: that is not measured."""
        us = self._us.get((rows, share))
        if us is None:
            return None
        limit = max(slowdown * alone, SLACK * self._us.get((rows, self.shares[0]), 0.0))
        sparing = alone + SPARING * (us - alone) * self._next(share) / share
        return max(limit, min(sparing, SPARING_SLOWDOWN * alone))
