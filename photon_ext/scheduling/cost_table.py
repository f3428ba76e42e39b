"""What steps cost, as measured: how many prompt tokens may ride beside decode rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

SLOWDOWN = 2.0  # a mixed step takes at most so many times as long as its decode rows alone
SLACK = 1.25  # where any prompt token makes it longer: times as long as the smallest share
WEIGHT = 1 / 8  # of a measurement in a smoothed time
DOUBT = 1 / 128  # of an expectation in a time that is not measured any more

Rows: TypeAlias = Hashable
"""Decode rows whose steps take the same: how many (a bucket), and what their graphs do besides."""


class CostTable:
    """Times of steps by decode rows and prompt tokens (a share, or 0).

    A share is allowed where it keeps a mixed step within SLOWDOWN times the decode step of the same
    rows: as measured, or else as expected, that is in proportion to the next smaller share. So each
    bucket begins with the smallest share, and tries the next one when measurements allow. A share
    that turns out too slow is one slow step, and is tried again after many others.

    Where a mixed step takes longer than that with the smallest share already, for what it costs
    besides its tokens, those shares are allowed which take hardly longer, within SLACK.

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
            self._doubt(rows, tokens)

    def allowed(self, rows: Rows) -> int:
        """The largest share that may ride beside so many decode rows; at least the smallest."""
        alone, best = self._alone(rows), self.shares[0]
        if alone is None and (rows, best) in self._us:
            return self.shares[:2][-1]  # two shares will tell what the rows take alone
        limit = self._limit(rows)
        for share in self.shares[1:]:
            us = self._us.get((rows, share)) or self._expected(rows, best, share)
            if limit is None or us is None or us > limit:
                break
            best = share
        return best

    def _doubt(self, rows: Rows, share: int) -> None:
        """What is known of the next larger share is not measured again while it is forbidden: it
        gives way to what is to be expected, and is forgotten once it would be allowed.
        """
        larger = next((size for size in self.shares if size > share), 0)
        if (known := self._us.get((rows, larger))) is None:  # as nearly always
            return
        limit, expected = self._limit(rows), self._expected(rows, share, larger)
        if limit is None or expected is None:
            return
        if expected <= limit < known:
            self._us[rows, larger] = known + DOUBT * (expected - known)
            if self._us[rows, larger] <= limit:
                del self._us[rows, larger]

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

    def _limit(self, rows: Rows) -> float | None:
        """How long a mixed step may take; None: that is not known yet."""
        alone, least = self._alone(rows), self._us.get((rows, self.shares[0]))
        if alone is None:
            return None
        return max(SLOWDOWN * alone, SLACK * (least or 0.0) if self._is_dear(rows) else 0.0)

    def _is_dear(self, rows: Rows) -> bool:
        """Whether the smallest share takes longer than SLOWDOWN allows."""
        alone, least = self._alone(rows), self._us.get((rows, self.shares[0]))
        return alone is not None and least is not None and least > SLOWDOWN * alone

    def _expected(self, rows: Rows, share: int, larger: int) -> float | None:
        """The time with a larger share, from that with `share`: no longer, where it is not the
        tokens that take the time.
        """
        alone, us = self._alone(rows), self._us.get((rows, share))
        if alone is None or us is None:
            return None
        return us if self._is_dear(rows) else alone + max(us - alone, 0.0) * larger / share
