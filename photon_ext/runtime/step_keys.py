"""Which steps are captured: a small fixed set of keys, and the one that holds a given step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from photon_ext.runtime.step import StepKey
from photon_ext.runtime.step_features import StepFeatures, subsets

LEAST_CHUNKS, CHUNK_TOKENS = 4, 128
BUCKETS = (1, *(8 << doubling for doubling in range(28)))


@dataclass(frozen=True, slots=True)
class StepKeys:
    """The keys of a pipeline's graphs, each whole and split, and with each subset of `features`:

    - a decode step for every decode bucket,
    - a prefill step for every prefill bucket,
    - with `mixed`, a mixed step for every pair of the two whose rows leave one for a chunk.

    The number of chunks is no dimension of the set: a step of so many tokens has room for one chunk
    for each `chunk_tokens` of them, and for 4 at least. There are never more than tokens, nor than
    rows beside those of the decode bucket. So D decode buckets and P prefill buckets make at most
    D + P + D x P keys, twice, and twice as many for each feature.

    Attributes:
        decode_buckets: decode rows, ascending; the last holds every row.
        prefill_buckets: prompt tokens, ascending; steps of more run eagerly.
        mixed: whether mixed steps are captured, too; else they run eagerly.
        chunk_tokens: more than 1 where empty segments cost the device time.
        features: what rows may ask for.
    """

    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...] = ()
    mixed: bool = False
    chunk_tokens: int = 1
    features: StepFeatures = StepFeatures.NONE

    @property
    def max_rows(self) -> int:
        """Rows of the pipeline."""
        return self.decode_buckets[-1]

    @property
    def max_segments(self) -> int:
        """R of the largest step, captured or eager."""
        return max(self.max_rows, *(key.segments for key in self.all()))

    def all(self) -> tuple[StepKey, ...]:
        """The set, in no order that matters."""
        pairs = [(rows, 0) for rows in self.decode_buckets]
        pairs += [(0, tokens) for tokens in self.prefill_buckets]
        if self.mixed:
            pairs += [
                (rows, tokens)
                for rows in self.decode_buckets
                for tokens in self.prefill_buckets
                if self._chunks(rows, tokens)
            ]
        return tuple(
            StepKey(rows, tokens, self._chunks(rows, tokens), split, features)
            for rows, tokens in pairs
            for split in (False, True)
            for features in subsets(self.features)
        )

    def decode_bucket(self, rows: int) -> int:
        """The smallest that holds so many decode rows, at most `max_rows`."""
        return self.decode_buckets[bisect_left(self.decode_buckets, rows)]

    def find(
        self,
        rows: int,
        tokens: int,
        chunks: int,
        split: bool,
        features: StepFeatures = StepFeatures.NONE,
    ) -> StepKey | None:
        """The smallest captured key that holds a step of so many decode rows, and so many prompt
        tokens, at least one, in so many chunks; None: there is none.
        """
        if rows and not self.mixed:
            return None
        padded = self.decode_bucket(rows) if rows else 0
        for size in self.prefill_buckets:
            if size >= tokens and (most := self._chunks(padded, size)) >= chunks:
                return StepKey(padded, size, most, split, features)
        return None

    def _chunks(self, decode_bucket: int, tokens: int) -> int:
        """How many chunks of `tokens` in all there is room for, beside the rows of a decode bucket,
        which are more than the next smaller bucket holds.
        """
        place = bisect_left(self.decode_buckets, decode_bucket)
        smaller = self.decode_buckets[place - 1] if place else 0
        least = smaller + 1 if decode_bucket else 0
        most = max(LEAST_CHUNKS, tokens // self.chunk_tokens)
        return min(tokens, most, self.max_rows - least)


def step_keys(
    max_rows: int,
    chunk: int,
    buckets: Iterable[int] | None,
    prefill_buckets: Iterable[int] | None,
    mixed: bool,
    *,
    graph: bool,
    captures_prefill: bool,
    features: StepFeatures = StepFeatures.NONE,
) -> StepKeys:
    """The keys of a pipeline's arguments, see Pipeline; `captures_prefill`: see RuntimePort."""
    if prefill_buckets is None:
        prefill_buckets = (chunk,) if captures_prefill else ()
    buckets = BUCKETS if buckets is None else buckets
    decode = {size for size in buckets if size < max_rows} | {max_rows}
    prefill = {size for size in prefill_buckets if size <= chunk and graph}
    chunk_tokens = 1 if captures_prefill else CHUNK_TOKENS
    ladders = tuple(sorted(decode)), tuple(sorted(prefill))
    return StepKeys(*ladders, mixed and bool(prefill), chunk_tokens, features)
