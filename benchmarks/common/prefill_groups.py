"""How many requests begin in one prefill step: what the medians of prefill steps are weighed by."""

from __future__ import annotations

import math

from photon_ext.observe.cost_model import Turnover, Workload, chance_of_an_end


def prefill_groups(work: Workload, depth: int) -> dict[int, float]:
    """The share of prefill steps in which so many requests begin. Their prompts fit into one step.

    At depth 2, where the zombie holds its row, the second prefill of a burst has those that ended
    in two decode steps, every other those of one; see cost_model. Requests that end in their
    prefill itself, one in L, are not counted with the group they join.
    """
    length, streams = work.tokens_per_request, work.streams
    if streams == 1 or length == 1:
        return {streams: 1.0}
    of_one = _group(length, streams)
    if depth == 1 or work.turnover is not Turnover.ROWS:
        return of_one
    ends, second = chance_of_an_end(length, streams), chance_of_an_end(length, 2 * streams)
    others = 1 + second * ends / (1 - ends)
    of_two = _group(length, 2 * streams).items()
    total = others + second
    return {n: (others * of_one.get(n, 0.0) + second * share) / total for n, share in of_two}


def _group(length: float, rows: int) -> dict[int, float]:
    """The chances that 1, 2, ... `rows` of so many row-steps end a sequence, where one does."""
    ends, goes_on = -math.log(length), math.log1p(-1 / length)
    any_end = chance_of_an_end(length, rows)

    def chance(count: int) -> float:
        lgamma = math.lgamma
        ways = lgamma(rows + 1) - lgamma(count + 1) - lgamma(rows - count + 1)
        return math.exp(ways + count * ends + (rows - count) * goes_on) / any_end

    return {count: chance(count) for count in range(1, rows + 1)}
