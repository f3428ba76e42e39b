"""How many tokens a step may have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from photon_ext.runtime import Chunk, Row
from photon_ext.runtime.step_features import StepFeatures, features_of, joined
from photon_ext.runtime.step_keys import StepKeys
from photon_ext.scheduling.cost_table import CostTable, Slowdown
from photon_ext.scheduling.step_times import StepLoad, StepTimes

LEAST_SHARE = 64  # smaller ones made prompts dearer: on a CPU in bfloat16 16 by a sixth, 32 by 5 %
# The rule: up to so many chunks of prompts that wait, a step may take so many times as long as its
# decode rows alone. The last: any time, so that the budget is a whole chunk.
BACKLOGS = (
    (2, Slowdown(2.0, sparing=2.5)),
    (16, Slowdown(2.5, sparing=2.5)),
    (math.inf, None),
)


class TokenBudget:
    """Prompt tokens of steps in which all decode rows are scheduled.

    Beside decode rows, the prefill budget is what the cost table allows, cut to what `max_tokens`
    leaves. It is never below the smallest budget, so that prefill does not starve even where decode
    rows alone use up `max_tokens` (hazard 28). BACKLOGS says how long a step may take: near
    saturation a smaller budget takes in less than arrives. Where more rows are in their prompts
    than decode, it is the largest backlog: the next tokens of a few rows wait for the first tokens
    of many. With small budgets a burst would stay in a state of few rows, which end as fast as
    prompts are read.
    """

    def __init__(
        self, keys: StepKeys, chunk: int, times: StepTimes, max_tokens: int | None = None
    ) -> None:
        """`times`: of steps with the budgets of `shares_of`. `max_tokens`: of a step, decode tokens
        included; None: no limit of its own.
        """
        self._keys = keys
        self._chunk = chunk
        self._max_tokens = keys.max_rows + chunk if max_tokens is None else max_tokens
        self._costs = CostTable(times)

    def prompt_tokens(
        self,
        decode_rows: int,
        prefill_rows: int,
        left: Iterable[int],
        features: StepFeatures = StepFeatures.NONE,
    ) -> int:
        """How many prompt tokens may be scheduled beside `decode_rows`.

        prefill_rows: rows that are in their prompts. left: the prompt tokens that each of them
        still has, read lazily until the answer is known. features: of the whole step.
        """
        waiting = math.inf if prefill_rows > decode_rows else self._waiting_chunks(left)
        slowdown = next(slowdown for most, slowdown in BACKLOGS if waiting <= most)
        allowed = self._chunk
        if slowdown is not None:
            rows = StepLoad(self._keys.decode_bucket(decode_rows), features=features)
            allowed = self._costs.allowed(rows, slowdown)
        least = self._costs.shares[0] if decode_rows else 1
        return max(min(allowed, self._max_tokens - decode_rows), least)

    def _waiting_chunks(self, left: Iterable[int]) -> float:
        """How many chunks these prompt tokens make, counted until they are the largest backlog."""
        many, tokens = BACKLOGS[-2][0] * self._chunk, 0
        for more in left:
            tokens += more
            if tokens > many:
                break
        return tokens / self._chunk

    def features(self, *rows: tuple[Row, ...]) -> StepFeatures:
        """What these rows ask for: such steps take longer, and are timed by themselves. Nobody is
        looked at where no row may ask for anything.
        """
        return joined(map(features_of, chain(*rows)) if self._keys.features else ())

    def fitting(self, decode_rows: int, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """The leading chunks that a captured step has room for; all of them where no captured step
        has their number of tokens.
        """
        tokens = sum(chunk.num_tokens for chunk in chunks)
        key = self._keys.find(decode_rows, tokens, 1, False)
        return chunks if key is None else chunks[: key.chunks]

    def timed(self, load: StepLoad) -> None:
        """A step of this load was timed."""
        self._costs.timed(load)


def shares_of(prefill_buckets: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """The prefill budgets to choose from. With several graphs: their numbers of tokens. With one
    (devices where idle tokens cost nothing) or none: doubled from LEAST_SHARE up to `chunk`.
    """
    if len(prefill_buckets) > 1:
        return prefill_buckets
    shares = [min(LEAST_SHARE, chunk)]
    while shares[-1] < chunk:
        shares.append(min(2 * shares[-1], chunk))
    return tuple(shares)
