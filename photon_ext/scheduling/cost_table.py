"""What steps cost, as measured: how many prompt tokens may ride beside decode rows."""

from __future__ import annotations

SLOWDOWN = 2.0  # a mixed step takes at most so many times as long as its decode rows alone
WEIGHT = 1 / 8  # of a measurement in the smoothed time


class CostTable:
    """Smoothed times of steps by decode rows (a bucket) and prompt tokens (a share, or 0).

    A share is allowed where it keeps a mixed step within SLOWDOWN times the decode step of the same
    rows: as measured, or else as expected of the next smaller share, because prompt tokens cost in
    proportion at most. So each bucket begins with the smallest share and goes on share by share.

    Attributes:
        shares: the numbers of prompt tokens to choose from, ascending.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self._us: dict[tuple[int, int], float] = {}

    def add(self, rows: int, tokens: int, us: float) -> None:
        """A step of these decode rows and prompt tokens has taken `us`; only none and full shares
        tell anything.
        """
        if tokens and tokens not in self.shares:
            return
        self._smooth(rows, tokens, us)
        larger = next((share for share in self.shares if share > tokens), None) if tokens else None
        if larger is not None and (rows, larger) in self._us:
            # a time that forbids a share is not measured again: it gives way to the expectation
            expected = self._expected(rows, tokens, larger)
            if expected is not None and expected < self._us[rows, larger]:
                self._smooth(rows, larger, expected)

    def allowed(self, rows: int) -> int:
        """The largest share that may ride beside so many decode rows; at least the smallest."""
        alone, best = self._alone(rows), self.shares[0]
        if alone is None and (rows, best) in self._us:
            return self.shares[:2][-1]  # two shares will tell what the rows take alone
        for share in self.shares[1:]:
            us = self._us.get((rows, share)) or self._expected(rows, best, share)
            if alone is None or us is None or us > SLOWDOWN * alone:
                break
            best = share
        return best

    def _smooth(self, rows: int, tokens: int, us: float) -> None:
        known = self._us.setdefault((rows, tokens), us)
        self._us[rows, tokens] = known + WEIGHT * (us - known)

    def _alone(self, rows: int) -> float | None:
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

    def _expected(self, rows: int, share: int, larger: int) -> float | None:
        """The time with a larger share, from that with `share`."""
        alone, us = self._alone(rows), self._us.get((rows, share))
        if alone is None or us is None:
            return None
        return alone + max(us - alone, 0.0) * larger / share
