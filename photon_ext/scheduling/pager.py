"""The KV pages of sequences: what they get at admission and while they run, what they share, and
what is kept when they leave.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from photon_ext.runtime import PageAppend, Row
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.prefix_cache import TOKEN_BYTES, Match, PrefixCache
from photon_ext.scheduling.range_pool import RangePool
from photon_ext.scheduling.sequence import Sequence

STRIDE = 4  # pages that a row gets at a time where it cannot have all


class Grant(NamedTuple):
    """Pages for a sequence's row, in order; the first ``cached`` tokens are in them already. The
    embeddings behind those are put from ``place`` on; None: there are none.
    """

    pages: list[int]
    cached: int
    place: int | None = None


class Growth(NamedTuple):
    """Pages that rows get before the next step, and rows whose next token has none."""

    appends: tuple[PageAppend, ...] = ()
    stalled: tuple[Row, ...] = ()


@dataclass(slots=True)
class _Holding:
    """What a sequence has.

    Attributes:
        entered: how many of its pages, from the first on, are in the cache's books.
        unwritten: of those, the ones that steps have not written yet, in order.
        missing: pages that it lacks for its length cap.
        place: of its embeddings, until its prompt is read.
    """

    entered: int
    unwritten: list[int]
    missing: int
    place: int | None


class Pager:
    """While the pool covers the length caps of all who run, each holds all its pages from admission
    on, and decode steps stay steady. Below that a sequence is admitted with the pages of its
    prompt, and gets more as it goes, several at a time, all rows at once.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        share: bool = True,
        exact: bool = False,
        embeds: RangePool | None = None,
    ) -> None:
        """``share``: sequences share pages of the same content. ``exact``: only pages of prompts,
        where what a decode step computes for a token differs in its last bits from what prefill
        computes. ``embeds``: places for the embeddings of prompts; None: no prompt has any.
        """
        self.pool = pool
        self._embeds = RangePool(0) if embeds is None else embeds
        self.page_size = page_size
        # only full pages are shared: none ever is, where they never end
        self._cache = PrefixCache(pool, page_size if share else sys.maxsize)
        self.exact = exact
        self._holdings: dict[Sequence, _Holding] = {}
        self._short: dict[Sequence, _Holding] = {}
        self._owed = 0  # pages that those lack together
        self._refused: Sequence | None = None  # too few pages or places for it, as things are

    def pages_for(self, kv_len: int) -> int:
        """Pages that hold ``kv_len`` KV entries."""
        return -(-kv_len // self.page_size)

    def awaited_by(self, sequence: Sequence) -> int | None:
        """The last page that the prompt continues with and that a row is writing; None: there is
        no reason to wait.
        """
        return self._match(sequence).awaited

    def _match(self, sequence: Sequence) -> Match:
        """Of nothing, where the prompt's own log-probabilities have to be computed."""
        scored = sequence.admission.params.prompt_logprobs is not None
        return self._cache.match(b"" if scored else sequence.content, sequence.root)

    def is_written(self, page: int) -> bool:
        """Whether the wait for it is over."""
        return self._cache.is_written(page)

    # --- admission --------------------------------------------------------------------------------

    def refuses(self, sequence: Sequence) -> bool:
        """Whether `grant` had too few pages or places for it, and none have changed hands since."""
        return sequence is self._refused

    def grant(self, sequence: Sequence) -> Grant | None:
        """Pages for a sequence that is to be admitted, and places for its embeddings; None where
        there are too few now.
        """
        admission = sequence.admission
        cached = self._match(sequence).pages
        if admission.params.counts_tokens:  # the device counts what is fed of an answer
            cached = cached[: admission.answer_begin // self.page_size]
        self._refused = sequence  # until it is held
        count = self._affordable(sequence, cached)
        if count is None:
            return None
        place, embeds = None, sequence.embeds_behind(len(cached) * self.page_size)
        if embeds and (place := self._embeds.allocate(embeds)) is None:
            return None
        self.pool.share(cached)  # first, so that they are not evicted for the others
        fresh = self.pool.allocate(count)
        assert fresh is not None
        pages = [*cached, *fresh]
        self._hold(sequence, pages, len(cached), place)
        return Grant(pages, len(cached) * self.page_size, place)

    def _affordable(self, sequence: Sequence, cached: list[int]) -> int | None:
        """How many pages it gets besides those that are cached."""
        pool, admission = self.pool, sequence.admission
        available = pool.available - pool.count_cached(cached)
        whole = self.pages_for(admission.kv_len) - len(cached)
        if available - self._owed >= whole:
            return whole
        first = self.pages_for(sequence.known + 1) - len(cached)
        # a page for each row, else one of them leaves at once; STRIDE times as many after each
        # preemption, so that a request comes back soon, and is preempted a few times at most
        room_to_grow = STRIDE**sequence.preemptions * (len(self._short) + 1)
        return min(first, whole) if available - room_to_grow >= first else None

    def _hold(self, sequence: Sequence, pages: list[int], cached: int, place: int | None) -> None:
        self._refused = None
        entered = self._cache.enter(sequence.content, pages, sequence.root, cached)
        missing = self.pages_for(sequence.admission.kv_len) - len(pages)
        holding = _Holding(entered, pages[cached:entered], missing, place)
        self._holdings[sequence] = holding
        if missing:
            self._short[sequence] = holding
            self._owed += missing

    def cancel(self, sequence: Sequence, grant: Grant) -> None:
        """The sequence was not admitted."""
        self._end(sequence, grant.pages)

    # --- while it runs ----------------------------------------------------------------------------

    def written(self, sequence: Sequence, tokens: int) -> None:
        """A committed step has written its first ``tokens`` tokens."""
        holding = self._holdings[sequence]
        if holding.unwritten:
            begin = holding.entered - len(holding.unwritten)
            count = max(tokens // self.page_size - begin, 0)
            self._cache.written(holding.unwritten[:count])
            del holding.unwritten[:count]
        if tokens >= len(sequence.admission.prompt_ids):
            self._free_place(holding)

    def _free_place(self, holding: _Holding) -> None:
        if holding.place is not None:
            self._embeds.release(holding.place)
            self._refused, holding.place = None, None

    def grow(self) -> Growth:
        """More pages, as a row has none for its next token: for every row that lacks some, so that
        the steps that follow send nothing; for those of the lowest rank first.
        """
        rows = [(one.row, one) for one in self._short if one.row is not None and one.row.running]
        places = {row: _places(row) for row, _ in rows}
        rows.sort(key=lambda one: (places[one[0]] > 0, one[1].rank))
        missing = [self._short[sequence].missing for _, sequence in rows]
        covered = self.pool.available >= self._owed
        wanted = missing if covered else [min(count, STRIDE) for count in missing]
        pages = iter(self.pool.allocate(min(sum(wanted), self.pool.available)) or ())
        appends, stalled = [], []
        for (row, sequence), count in zip(rows, wanted, strict=True):
            if more := tuple(islice(pages, count)):
                appends.append(PageAppend(row, more))
                self._count(sequence, len(more))
            elif not places[row]:
                stalled.append(row)
        return Growth(tuple(appends), tuple(stalled))

    def _count(self, sequence: Sequence, pages: int) -> None:
        self._refused, holding = None, self._short[sequence]
        holding.missing -= pages
        self._owed -= pages
        if not holding.missing:
            del self._short[sequence]

    # --- the end ----------------------------------------------------------------------------------

    def release(self, sequence: Sequence, row: Row) -> None:
        """No step in flight uses the row: its pages are free, or kept for what they hold."""
        pages = row.pages if self.exact else self._keep_generated(sequence, row.pages)
        self._end(sequence, pages)

    def _keep_generated(self, sequence: Sequence, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Enters the pages of its answer. Returns its pages, among them the cache's where that has
        others of the same content, because what follows is found behind those alone.
        """
        tokens, prompt = sequence.whole_content(), sequence.admission.prompt_ids
        if len(tokens) <= len(sequence.content):
            return pages
        begin = self._holdings[sequence].entered
        if begin < len(prompt) // self.page_size:
            found = self._cache.match(tokens, sequence.root).pages
            begin = len(found)
            self.pool.share(found)
            self.pool.release(pages[:begin])
            pages = (*found, *pages[begin:])
        # the last token was sampled, and never fed
        end = self._cache.enter(tokens[:-TOKEN_BYTES], pages, sequence.root, begin)
        self._cache.written(pages[begin:end])
        return pages

    def _end(self, sequence: Sequence, pages: Any) -> None:
        self._refused, holding = None, self._holdings.pop(sequence)
        if self._short.pop(sequence, None) is not None:
            self._owed -= holding.missing
        self._free_place(holding)
        self._cache.abandon(holding.unwritten)
        self.pool.release(pages)


def _places(row: Row) -> int:
    """Decode steps, launched from now on, for which it has pages."""
    entries = row.capacity - max(row.next_position, len(row.prompt_ids))
    return entries // row.step_tokens
