"""Which steps are captured: a small fixed set of keys, and the one that holds a given step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from photon_ext.runtime.step import StepKey

BUCKETS = (1, *(8 << doubling for doubling in range(28)))


@dataclass(frozen=True, slots=True)
class StepKeys:
    """The keys of a pipeline's graphs, each whole and split:

    - a decode step for every decode bucket,
    - a prefill step for every prefill bucket,
    - with `mixed`, a mixed step for every pair of the two whose rows leave one for a chunk.

    The number of chunks is no dimension of the set: beside a decode bucket's rows there is room for
    so many chunks and no more, and a chunk has a token at least. So D decode buckets and P prefill
    buckets make at most D + P + D x P keys, twice.

    Attributes:
        decode_buckets: decode rows, ascending; the last holds every row.
        prefill_buckets: prompt tokens, ascending; steps of more run eagerly.
        mixed: whether mixed steps are captured, too; else they run eagerly.
    """

    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...] = ()
    mixed: bool = False

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
            StepKey(rows, tokens, self._chunks(rows, tokens), split)
            for rows, tokens in pairs
            for split in (False, True)
        )

    def decode_bucket(self, rows: int) -> int:
        """The smallest that holds so many decode rows, at most `max_rows`."""
        return next(size for size in self.decode_buckets if size >= rows)

    def find(self, rows: int, tokens: int, split: bool) -> StepKey | None:
        """The smallest captured key that holds a step of so many decode rows and so many prompt
        tokens, at least one, in any number of chunks; None: there is none.
        """
        bucket = next((size for size in self.prefill_buckets if size >= tokens), None)
        if bucket is None or (rows and not self.mixed):
            return None
        padded = self.decode_bucket(rows) if rows else 0
        return StepKey(padded, bucket, self._chunks(padded, bucket), split)

    def _chunks(self, decode_bucket: int, tokens: int) -> int:
        """As many chunks of `tokens` in all as there can be beside the rows of a decode bucket,
        which are more than the next smaller bucket holds.
        """
        smaller = max((size for size in self.decode_buckets if size < decode_bucket), default=0)
        least = smaller + 1 if decode_bucket else 0
        return min(tokens, self.max_rows - least)


def step_keys(
    max_rows: int,
    chunk: int,
    buckets: Iterable[int] | None,
    prefill_buckets: Iterable[int] | None,
    mixed: bool,
    *,
    graph: bool,
    captures_prefill: bool,
) -> StepKeys:
    """The keys of a pipeline's arguments, see Pipeline; `captures_prefill`: see RuntimePort."""
    if prefill_buckets is None:
        prefill_buckets = (chunk,) if captures_prefill else ()
    buckets = BUCKETS if buckets is None else buckets
    decode = {size for size in buckets if size < max_rows} | {max_rows}
    prefill = {size for size in prefill_buckets if size <= chunk and graph}
    return StepKeys(tuple(sorted(decode)), tuple(sorted(prefill)), mixed and bool(prefill))
