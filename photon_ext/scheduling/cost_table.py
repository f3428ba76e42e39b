"""What steps cost, as measured: how many prompt tokens may ride beside decode rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

SLOWDOWN = 2.0  # of a mixed step: so many times as long as its decode rows alone, at most
SPARING_SLOWDOWN, SPARING = (
    2.5,
    0.9,
)  # the same, where a prompt token takes so much less beyond that
DEAR = 1.5  # where the smallest share takes more, it is not for its tokens alone
SLACK = 1.25  # times as long as the smallest share, where that is more
WEIGHT = 1 / 8  # of a measurement in a smoothed time
DOUBT = 1 / 128  # of an expectation in a time that is not measured any more

Rows: TypeAlias = Hashable
"""Decode rows whose steps take the same: how many (a bucket), and what their graphs do besides."""


class CostTable:
    """Times of steps by decode rows and prompt tokens (a share, or 0).

    A share is allowed where it keeps a mixed step within so many times the decode step of the same
    rows (SLOWDOWN, or what is asked): as measured, or else as expected from smaller shares. So each
    bucket begins with the smallest share, and tries the next one when measurements allow. A share
    that turns out too slow is one slow step, and is tried again after many others.

    Mixing itself has a price, which may be most of what the smallest share takes. So those shares
    are allowed, too, which take hardly longer than that one, within SLACK; and where it is DEAR, a
    larger share is expected to take no longer, until it is measured. And up to SPARING_SLOWDOWN a
    share is allowed that spares the rows time in all: a prompt takes fewer steps, and each of its
    tokens less of what steps take beyond their rows (SPARING of it, at most).

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
        limit, most = (self._limit(rows, alone, by) for by in (slowdown, SPARING_SLOWDOWN))
        for share in self.shares[1:]:
            us = self._us.get((rows, share)) or self._expected(rows, best, share)
            if us is None or us > most:
                break
            if us > limit and not self._spares(rows, alone, best, share, us):
                break
            best = share
        return best

    def _spares(self, rows: Rows, alone: float, share: int, larger: int, us: float) -> bool:
        """Whether a larger share, whose steps take `us`, takes less beyond the rows alone for each
        of its tokens than `share`.
        """
        known = self._us.get((rows, share))
        return known is not None and (us - alone) / larger < SPARING * (known - alone) / share

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
        gives way to what is to be expected, and is forgotten once it would be allowed at any time.
        """
        larger = next((size for size in self.shares if size > share), 0)
        if (known := self._us.get((rows, larger))) is None:  # as nearly always
            return
        alone, expected = self._alone(rows), self._expected(rows, share, larger)
        if alone is None or expected is None:
            return
        limit = self._limit(rows, alone)
        if expected >= known or known <= limit:
            return
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

    def _limit(self, rows: Rows, alone: float, slowdown: float = SLOWDOWN) -> float:
        """How long a mixed step may take."""
        return max(slowdown * alone, SLACK * self._us.get((rows, self.shares[0]), 0.0))

    def _is_dear(self, rows: Rows) -> bool:
        """Whether the smallest share takes so long that it is not for its tokens alone."""
        alone, least = self._alone(rows), self._us.get((rows, self.shares[0]))
        return alone is not None and least is not None and least > DEAR * alone

    def _expected(self, rows: Rows, share: int, larger: int) -> float | None:
        """The time with a larger share, on the line through that with `share` and the one below it:
        the decode step, or where mixing is dear the next smaller share; without one, no longer.
        """
        below, us = self._below(rows, share), self._us.get((rows, share))
        if below is None or us is None:
            return None
        tokens, less = below
        if tokens == share:
            return us
        return us + max(us - less, 0.0) * (larger - share) / (share - tokens)

    def _below(self, rows: Rows, share: int) -> tuple[int, float] | None:
        """Fewer tokens than `share` and their time, or `share` itself where it is the smallest that
        tells; None: what the rows take alone is not known.
        """
        alone = self._alone(rows)
        if alone is None or not self._is_dear(rows):
            return None if alone is None else (0, alone)
        known = [size for size in self.shares if size < share and (rows, size) in self._us]
        size = max(known, default=share)
        us = self._us.get((rows, size))
        return None if us is None else (size, us)
