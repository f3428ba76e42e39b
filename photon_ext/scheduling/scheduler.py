"""Who waits, and who holds rows and pages; the registry says which requests there are."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic

from photon_ext.errors import RequestError
from photon_ext.runtime import FinishReason, Row, RowEvent, StepResult
from photon_ext.scheduling.adapters import AdapterSlots
from photon_ext.scheduling.automaton_pool import AutomatonPool
from photon_ext.scheduling.pager import Grant, Growth, Pager
from photon_ext.scheduling.registry import Registry
from photon_ext.scheduling.sequence import Sequence, SequenceState, Sink
from photon_ext.scheduling.token_log import TokenLog

_rank = attrgetter("rank")


@dataclass(slots=True)
class RequestStats:
    """Counters of requests, which other threads may read.

    Attributes:
        timeouts: requests that their deadline ended.
        refusals: requests that a full queue refused.
        prompt_tokens: prompt tokens of admitted rows, those of preempted requests again.
        prefix_hit_tokens: of them, those found in cached pages.
        device_constraints, host_constraints: requests that got a row with a constraint, by where
            it is kept.
        preemptions: requests that left their rows before they had ended.
    """

    timeouts: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    device_constraints: int = 0
    host_constraints: int = 0
    preemptions: int = 0


class Scheduler(Generic[Sink]):
    """Knows a sequence from `add` to `finish`; its row and pages are returned by `release`, which
    may come later (zombies), or before: then it was preempted, and waits again. The engine thread
    owns all but `fit`, which reads constants only.

    Attributes:
        registry: the requests that have not ended.
        log: the tokens of rows that decode together.
        stats: counters of requests.
        released: rows that the pipeline has released, for `release_all`: until the next turn a
            commit may still speak of them.
    """

    def __init__(
        self,
        pager: Pager,
        max_rows: int,
        max_len: int,
        adapters: AdapterSlots | None = None,
        automata: AutomatonPool | None = None,
    ) -> None:
        """`max_len`: tokens of a sequence, prompt and generated. `adapters`, `automata`: where
        those of sequences are put; None: no sequence has one.
        """
        self.pool = pager.pool
        self.automata = AutomatonPool(0) if automata is None else automata
        self.max_rows = max_rows
        self.registry = Registry[Sink]()
        self.log = TokenLog[Sink]()
        self.stats = RequestStats()
        self.released: list[Row] = []
        self._pager = pager
        self._max_len = max_len
        self._waiting: list[Sequence[Sink]] = []
        self._adapters = AdapterSlots() if adapters is None else adapters
        self._deferred: dict[Sequence[Sink], int | None] = {}  # a page, or None: a slot
        self._in_rows: dict[Row, Sequence[Sink]] = {}

    @property
    def waiting(self) -> Seq[Sequence[Sink]]:
        """Sequences that may be admitted, by rank: the scheduler's own list, to be read."""
        return self._waiting

    @property
    def waiting_count(self) -> int:
        """Sequences without a row, those that `defer` took aside included."""
        return len(self._waiting) + len(self._deferred)

    @property
    def running(self) -> list[Sequence[Sink]]:
        """Sequences whose rows run."""
        return [one for one in self._in_rows.values() if one.state is SequenceState.RUNNING]

    @property
    def rows_held(self) -> int:
        """Rows in use, those of ended sequences whose steps are still in flight included."""
        return len(self._in_rows)

    def fit(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The length cap of a request, cut to what the context leaves.

        Raises RequestError for what this engine can never serve, however long it waits.
        """
        if prompt_tokens > self._max_len:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and the context holds {self._max_len}; "
                "shorten the prompt, or make the engine with a larger max_len"
            )
        cap = min(max_new_tokens, self._max_len - prompt_tokens + 1)
        needed, total = self._pager.pages_for(prompt_tokens + cap - 1), self.pool.num_pages
        if needed > total:
            size = self._pager.page_size
            raise RequestError(
                f"a prompt of {prompt_tokens} tokens and max_new_tokens {cap} need {needed} pages "
                f"of {size} tokens and the pool has {total}; ask for fewer tokens "
                f"({total * size} in all), or make the engine with more num_pages"
            )
        return cap

    def add(self, sequence: Sequence[Sink]) -> None:
        """A registered sequence waits from here on."""
        self._wait(sequence)

    def sequence_of(self, row: Row) -> Sequence:
        """Who holds a row, ended or not."""
        return self._in_rows[row]

    def must_wait(self, sequence: Sequence[Sink]) -> bool:
        """Whether `schedule` had too few pages or places for it, and still has."""
        return self._pager.refuses(sequence)

    def defer(self, sequence: Sequence[Sink]) -> bool:
        """Takes a waiting sequence aside while another row is writing pages that its prompt begins
        with, as it would write them once more, or while its adapter is in no slot. False where
        there is no such reason.
        """
        page, adapter = self._pager.awaited_by(sequence), sequence.adapter
        if page is None and (
            adapter is None or self._adapters.ready(adapter, sequence.rank, not self._in_rows)
        ):
            return False
        self._unqueue(sequence)
        self._deferred[sequence] = page
        return True

    def recall(self) -> None:
        """Those whose pages are written, or who may find a slot now, wait in their places again."""
        news = self._adapters.news(not self._in_rows)
        if not self._deferred:  # as nearly always
            return
        pages = {page for page in self._deferred.values() if page is not None}
        over: set[int | None] = {page for page in pages if self._pager.is_written(page)}
        if news:
            over.add(None)
        if over:
            for sequence in [one for one, page in self._deferred.items() if page in over]:
                del self._deferred[sequence]
                self._wait(sequence)

    def schedule(self, sequence: Sequence[Sink]) -> Grant | None:
        """Takes a waiting sequence out of the queue and gives it its pages; `admit` or `cancel`
        follows. None where there are too few, or no row is free.
        """
        if len(self._in_rows) >= self.max_rows or not self._hold_automaton(sequence):
            return None
        grant = self._pager.grant(sequence)
        if grant is not None:
            self._unqueue(sequence)
        else:
            self._release_automaton(sequence)
        return grant

    def admit(self, sequence: Sequence[Sink], row: Row, grant: Grant) -> None:
        """The scheduled sequence has got this row."""
        sequence.row = row
        self._in_rows[row] = sequence
        if sequence.adapter is not None:
            self._adapters.hold(sequence.adapter)
        self.stats.prompt_tokens += len(row.prompt_ids)
        self.stats.prefix_hit_tokens += grant.cached
        if not sequence.preemptions:
            sequence.admitted = time.perf_counter()
            sequence.sink.cached_tokens = grant.cached
            self.stats.device_constraints += sequence.automaton is not None
            self.stats.host_constraints += sequence.constraint is not None

    def cancel(self, sequence: Sequence[Sink], grant: Grant) -> None:
        """The scheduled sequence was not admitted: it has its place in line again."""
        self._pager.cancel(sequence, grant)
        self._release_automaton(sequence)
        self._wait(sequence)

    def grow(self) -> Growth:
        """See Pager.grow."""
        return self._pager.grow()

    def _hold_automaton(self, sequence: Sequence[Sink]) -> bool:
        """False where there is no place for it now."""
        if sequence.automaton is None:
            return True
        begin = self.automata.hold(sequence.automaton)
        sequence.automaton_begin = begin or 0
        return begin is not None

    def _release_automaton(self, sequence: Sequence[Sink]) -> None:
        if sequence.automaton is not None:
            self.automata.release(sequence.automaton)

    def _wait(self, sequence: Sequence[Sink]) -> None:
        insort(self._waiting, sequence, key=_rank)

    def _unqueue(self, sequence: Sequence[Sink]) -> None:
        """It waits no more, if it did: a submission that was interrupted never came here."""
        place = bisect_left(self._waiting, sequence.rank, key=_rank)
        if sequence in self._waiting[place : place + 1]:
            del self._waiting[place]

    def finish(self, sequence: Sequence[Sink]) -> None:
        """The sequence has ended; its row and pages stay until `release`."""
        if sequence in self._deferred:
            del self._deferred[sequence]
            self._adapters.left()
        elif sequence.state is SequenceState.WAITING:
            self._unqueue(sequence)
        self.registry.remove(sequence)
        sequence.ended, sequence.embeds = True, None
        if not sequence.host_checked:
            sequence.sink.materialize()

    def release(self, row: Row) -> None:
        """The row is released: no step in flight uses its pages. A sequence that has not ended was
        preempted, and waits again.
        """
        sequence = self._in_rows.pop(row)
        if not sequence.host_checked:
            sequence.sink.materialize()
        self._pager.release(sequence, row)
        self._release_automaton(sequence)
        if sequence.adapter is not None:
            self._adapters.drop(sequence.adapter)
        if not sequence.ended:
            sequence.requeue(self._pager.exact)
            self.stats.preemptions += 1
            self._wait(sequence)

    def release_all(self) -> None:
        """Releases the rows of `released`."""
        for row in self.released:
            self.release(row)
        self.released.clear()

    def forget_batch(self) -> None:
        """While no row is in use, the log keeps no request that ran last."""
        self.log.attach((), self._in_rows.__getitem__)

    def advance(self, result: StepResult) -> Iterator[tuple[Sequence[Sink], RowEvent]]:
        """Takes the tokens of a step: those of ordinary rows as columns.

        Yields what has to be looked at: ends and first tokens, and all tokens of host-checked
        sequences, but none that is repeated. Tokens of host-checked sequences, and of ends, are not
        told to the request yet.
        """
        log = self.log
        for row, found in result.logprobs.items():  # before their tokens, which readers may see
            sequence = self._in_rows[row]
            sequence.sink.add_logprobs(found[sequence.repeats :])
        for row, (position, scores) in result.prompt_logprobs.items():
            sequence = self._in_rows[row]
            sequence.sink.add_prompt_logprobs(sequence.new_scores(position, scores))
        for chunk in () if result.step is None else result.step.chunks:
            # also of rows that have ended: a step in flight has written all of its chunks
            self._pager.written(self._in_rows[chunk.row], chunk.position + chunk.num_tokens)
        if result.rows and result.rows is not log.rows:
            log.attach(result.rows, self._in_rows.__getitem__)
        for column in log.host_checked if result.rows else ():
            tokens = () if column in result.events else result.tokens_of(column)
            if tokens:
                event = RowEvent(result.rows[column], tokens, None)
                yield from self._seen(log.sequences[column], event)
        for event in result.events.values():
            sequence = self._in_rows[event.row]
            if not sequence.host_checked and not sequence.repeats:
                sequence.sink.materialize()
            yield from self._seen(sequence, event)
        if result.rows:
            log.steps.extend(result.tokens)  # what ends here was materialized before

    def _seen(
        self, sequence: Sequence[Sink], event: RowEvent
    ) -> Iterator[tuple[Sequence[Sink], RowEvent]]:
        """The event, without tokens that are repeated, as they should be."""
        if count := sequence.repeats:
            for token in event.tokens[:count]:
                if (fault := sequence.repeat(token)) is not None:
                    yield sequence, RowEvent(event.row, (), FinishReason.ERROR, fault)
                    return
            if not sequence.repeats:
                self.log.rows = ()  # so that its request follows its column from the next step on
            event = event._replace(tokens=event.tokens[count:])
            if not event.tokens and event.finish is None:
                return
        if not sequence.host_checked and event.finish is None:
            sequence.sink.add(event.tokens)
        yield sequence, event
