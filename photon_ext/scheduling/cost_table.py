"""What prompt tokens cost beside decode rows: how many of them the measured times allow."""

from __future__ import annotations

from typing import NamedTuple

from photon_ext.scheduling.step_times import StepLoad, StepTimes

SPARING = 0.9  # lower: delay per prompt token is at most this part of the next smaller budget's
SLACK = 1.25  # or this many times as long as with the smallest budget, where that is more
DOUBT = 1 / 128  # of the expected time in a stale estimate, at each step
MARGIN = 0.02  # of the decode step: how far below the limit a stale estimate decays


class Slowdown(NamedTuple):
    """How many times as long as its decode rows alone a mixed step may take; and where a larger
    budget lowers the total delay of the rows.
    """

    most: float
    sparing: float


RULE = Slowdown(2.0, 2.5)  # unless the caller asks for another


class CostTable:
    """Reads times of steps by decode rows and prompt tokens (a prefill budget, or 0). Rows are
    given as the load of their decode step.

    A budget is allowed where any of these holds:

    - A mixed step takes at most `Slowdown.most` times as long as the decode step of the same rows.
    - It takes at most SLACK times as long as with the smallest budget: mixing itself has a price,
      which may be most of what the smallest budget costs.
    - It takes at most `Slowdown.sparing` times as long as the decode step, and the delay per prompt
      token (the time beyond the decode step) falls to SPARING of the next smaller budget's.

    Each bucket begins with the smallest budget, and tries the next one when that is allowed. A
    budget that turns out too slow costs one slow step, and is tried again after many others. Of a
    mixed step the table reads the most that it takes, of a decode step the usual. Times of budgets
    that are not used any more it corrects itself, in `StepTimes.known`: nobody else reads them.

    Attributes:
        shares: the prefill budgets (numbers of prompt tokens) to choose from, ascending.
    """

    def __init__(self, times: StepTimes) -> None:
        self.shares = times.budgets
        self._times = times

    def timed(self, load: StepLoad) -> None:
        """A step of this load has a new time: what does that say of other budgets?"""
        if load.prompt_tokens:
            rows = load.beside(0)
            self._bound_smaller(rows, load.prompt_tokens)
            self._doubt(rows, load.prompt_tokens)

    def allowed(self, rows: StepLoad, slowdown: Slowdown = RULE) -> int:
        """The largest budget that is allowed beside these decode rows; at least the smallest."""
        alone, best = self._alone(rows), self.shares[0]
        if alone is None:  # known once two budgets are measured
            return best if self._us(rows, best) is None else self.shares[:2][-1]
        for share in self.shares[1:]:
            us, longest = self._us(rows, share), self._longest(rows, alone, best, slowdown)
            if longest is None or (us is not None and us > longest):
                break
            best = share
        return best

    def _us(self, rows: StepLoad, share: int) -> float | None:
        """What a step with this budget takes at most; None: that is not known."""
        known = self._times.known.get(rows.beside(share))
        return None if known is None else known.most

    def _correct(self, rows: StepLoad, share: int, us: float) -> None:
        self._times.known[rows.beside(share)].most = us

    def _bound_smaller(self, rows: StepLoad, share: int) -> None:
        """Fewer tokens take no longer. So one slow step with a budget that is not used any more
        does not count for ever.
        """
        us = self._us(rows, share)
        for smaller in self.shares[: self.shares.index(share)]:
            known = self._us(rows, smaller)
            if us is not None and known is not None and known > us:
                self._correct(rows, smaller, us)

    def _doubt(self, rows: StepLoad, share: int) -> None:
        """The next larger budget is not measured while it is forbidden, so its estimate is stale.
        The estimate decays toward the time expected from this budget, or toward a little less than
        the limit, and is dropped once it is within the limit.
        """
        alone, larger, us = self._alone(rows), self._next(share), self._us(rows, share)
        known = self._us(rows, larger) if larger else None
        if alone is None or known is None or us is None:  # as nearly always
            return
        longest = self._longest(rows, alone, share, RULE)
        if longest is None or known <= longest:
            return
        expected = alone + (us - alone) * larger / share
        known += DOUBT * (min(expected, longest - MARGIN * alone) - known)
        self._correct(rows, larger, known)
        if known <= longest:
            del self._times.known[rows.beside(larger)]

    def _next(self, share: int) -> int:
        """The next larger budget; 0: there is none."""
        return next((size for size in self.shares if size > share), 0)

    def _alone(self, rows: StepLoad) -> float | None:
        """The time of the rows' decode step; where none was measured, that of 0 prompt tokens,
        extrapolated from the two smallest budgets. None: these are not measured either.
        """
        measured = self._times.known.get(rows)
        if measured is not None:
            return measured.usual
        if len(self.shares) < 2:
            return None
        less, more = self.shares[:2]
        shorter, longer = self._us(rows, less), self._us(rows, more)
        if shorter is None or longer is None:
            return None
        return shorter - max(longer - shorter, 0.0) * less / (more - less)

    def _longest(
        self, rows: StepLoad, alone: float, share: int, slowdown: Slowdown
    ) -> float | None:
        """How long a step with the budget above `share` may take; None: `share` is not measured."""
        us = self._us(rows, share)
        if us is None:
            return None
        limit = max(slowdown.most * alone, SLACK * (self._us(rows, self.shares[0]) or 0.0))
        sparing = alone + SPARING * (us - alone) * self._next(share) / share
        return max(limit, min(sparing, slowdown.sparing * alone))
