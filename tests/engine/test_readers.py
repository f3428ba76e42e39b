"""Readers of a request see its tokens in order, whenever they start and whoever joins, leaves and
ends around it: against lists that are simply written down.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from photon_ext.engine import Request, StreamEvent
from photon_ext.engine.output import End
from photon_ext.engine.reader import EventReader
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.runtime import Admission, FinishReason, Row, RowEvent, RowParams, StepResult
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.scheduling import PagePool, Pager, Scheduler, Sequence
from tests.conftest import EXAMPLES
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR])


class Reader:
    """Takes what has come, now and then."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seen: list[int] = []
        self._events = EventReader(request)

    def read(self) -> None:
        if not self._events.ended:
            self.seen += [token for event in self._events.take() for token in event.token_ids]


class ReaderMachine(RuleBasedStateMachine):
    """Steps of a pipeline that is not there: their columns are drawn, and written down."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(Pager(PagePool(1000), 4), 1000, 64)
        self.told: dict[Request, list[int]] = {}
        self.decode: tuple[Row, ...] = ()  # the same tuple while nobody joins or leaves
        self.readers: list[Reader] = []
        self.rows, self.queue = 0, RequestQueue()

    def step(self, tokens: list[tuple[int, ...]], events: dict[int, RowEvent]) -> None:
        """Commits a step, in which rows got so many tokens, and does with it what the engine's loop
        does.
        """
        rows = self.decode if tokens else ()
        given = [
            () if self.scheduler.sequence_of(row).ended else own
            for row, own in zip(rows, tokens, strict=True)
        ]
        columns = [array("i", column) for column in zip_longest(*given, fillvalue=-1)]
        result = StepResult(None, rows, columns or [array("i", [-1]) * len(rows)], events)
        for column, row in enumerate(rows):
            if column not in events:
                self.told[self.scheduler.sequence_of(row).sink] += given[column]
        for sequence, event in self.scheduler.advance(result):
            if sequence.host_checked and event.finish is None:
                sequence.sink.add(event.tokens)
            if event.finish is not None:
                self.scheduler.finish(sequence)
                sequence.sink.finish(End(event.finish), event.tokens)

    def join(self, host_checked: bool) -> Row:
        admission = Admission((1, 2), RowParams(max_new_tokens=8))
        sequence = Sequence(admission, None, Request(self.queue), host_checked)
        self.scheduler.registry.add([sequence])
        self.scheduler.add(sequence)
        grant = self.scheduler.schedule(sequence)
        assert grant is not None
        self.rows += 1
        row = Row(self.rows, 1, tuple(grant.pages), *admission[:2])
        self.scheduler.admit(sequence, row, grant)
        self.told[sequence.sink] = []
        return row

    def event(self, row: Row, tokens: tuple[int, ...], finish: FinishReason | None) -> RowEvent:
        """An error may come behind tokens, and with none of them."""
        self.told[self.scheduler.sequence_of(row).sink] += tokens
        error = "out of order" if finish is FinishReason.ERROR else None
        return RowEvent(row, tokens, finish, error)

    @rule(host_checked=st.booleans(), mixed=st.booleans(), data=st.data())
    def prefill(self, host_checked: bool, mixed: bool, data: st.DataObject) -> None:
        """A prompt ends, alone or in a mixed step; its row decodes from the next step on."""
        row = self.join(host_checked)
        tokens = data.draw(tokens_of(self.decode)) if mixed else []
        finish = data.draw(st.none() | REASONS)
        event = self.event(row, (data.draw(st.integers(0, 99)),), finish)
        self.step(tokens, {len(tokens): event})
        self.regroup([*self.decode, row])

    @precondition(lambda self: self.decode)
    @rule(data=st.data())
    def quiet_step(self, data: st.DataObject) -> None:
        self.step(data.draw(tokens_of(self.decode)), {})

    @precondition(lambda self: self.decode)
    @rule(data=st.data(), zombies=st.booleans())
    def step_with_ends(self, data: st.DataObject, zombies: bool) -> None:
        """Rows end; they may ride in the steps that were launched before that was known."""
        live = [i for i, row in enumerate(self.decode) if not self.scheduler.sequence_of(row).ended]
        ends = data.draw(st.sets(st.sampled_from(live))) if live else set()
        tokens = data.draw(tokens_of(self.decode))
        events = {
            column: self.event(self.decode[column], tokens[column], data.draw(REASONS))
            for column in sorted(ends)
        }
        self.step(tokens, events)
        if not zombies:
            self.regroup(self.decode)

    @precondition(lambda self: self.scheduler.registry.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.registry.live))
        self.scheduler.finish(sequence)
        sequence.sink.finish(End(FinishReason.CANCELLED))

    def regroup(self, rows: Any) -> None:
        self.decode = tuple(row for row in rows if not self.scheduler.sequence_of(row).ended)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def start_to_read(self, data: st.DataObject) -> None:
        reader = Reader(data.draw(st.sampled_from(list(self.told))))
        reader.read()
        assert reader.seen == self.told[reader.request]
        self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.read()
        assert reader.seen == self.told[reader.request]

    @invariant()
    def nobody_has_seen_what_was_not_told(self) -> None:
        for reader in self.readers:
            assert reader.seen == self.told[reader.request][: len(reader.seen)]

    def teardown(self) -> None:
        for request, told in self.told.items():
            late = Reader(request)
            late.read()
            assert late.seen == told


def tokens_of(rows: tuple[Row, ...]) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """One token for each row; or up to three, for some none."""
    size, token = len(rows), st.integers(0, 99)
    one, several = st.tuples(token), st.lists(token, max_size=3).map(tuple)
    return st.one_of(*(st.lists(each, min_size=size, max_size=size) for each in (one, several)))


TestReaders = ReaderMachine.TestCase
TestReaders.settings = settings(max_examples=50 * EXAMPLES, stateful_step_count=30)


def test_a_reader_that_is_overtaken_while_it_reads_sees_no_token_of_another() -> None:
    """The request settles, and its column goes on with others' tokens, between the reader's look
    at where the tokens are and its look at them.
    """

    class Overtaken(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            if reading:
                reading.clear()
                request.materialize()
                self.append(array("i", [99]))
            return super().__getitem__(key)

    reading: list[bool] = []
    request, log = Request(RequestQueue()), Overtaken()
    request.add([5])
    request.attach(log, 0)
    log.append(array("i", [6]))
    reading.append(True)
    assert request.tokens_from(0) == [5, 6]


def test_a_reader_that_comes_while_another_leaves_is_woken() -> None:
    """The last reader to leave takes the request out of those that are read; who joins just then
    would sleep until the end.
    """
    queue = RequestQueue()
    request = Request(queue)
    request.add([5])

    class Joined(set[Any]):
        """At the moment at which nobody is left, somebody joins."""

        def __bool__(self) -> bool:
            empty = len(self) == 0
            if empty:
                self.add(lambda: None)
                queue.read.add(request)
            return not empty

    request._wakers = Joined()
    leaving = request.iter()
    next(leaving)
    leaving.close()
    assert request in queue.read


@pytest.mark.parametrize("depth", [1, 2])
def test_readers_in_threads_see_every_token_in_order_while_batches_change(depth: int) -> None:
    """Ordinary and host-checked requests in one batch, of many lengths, some cancelled; readers
    start with them, in the middle, and after the end.
    """
    params = [
        SamplingParams(20),
        SamplingParams(7),
        SamplingParams(24, constraint=from_allowed_ids(range(40, 90))),
        SamplingParams(13),
        SamplingParams(30, stop="never"),
        SamplingParams(50),
    ]
    events: dict[int, list[list[StreamEvent]]] = {}

    def read(number: int, request: Request) -> None:
        events.setdefault(number, []).append(list(request.iter()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        device = WatchedDevice(depth=depth, max_rows=3, max_len=128)
        with engine_on(device, num_pages=96, tokenizer=byte_tokenizer()) as engine:
            requests = [
                engine.submit([n, n + 1], params[n % len(params)]) for n in range(4 * len(params))
            ]
            threads: list[threading.Thread] = []
            for delay in (0.0, 0.01, 0.03):
                time.sleep(delay)
                for number, request in enumerate(requests):
                    threads.append(threading.Thread(target=read, args=(number, request)))
                    threads[-1].start()
                requests[-1 - len(threads) % 5].cancel()
            for thread in threads:
                thread.join(30)
            for number, request in enumerate(requests):
                read(number, request)
    finally:
        sys.setswitchinterval(interval)
    for number, request in enumerate(requests):
        first, *others = events[number]
        assert len(others) == 3
        assert all(seen == first for seen in others)
        output = request.result(0)
        assert tuple(token for event in first for token in event.token_ids) == output.token_ids
        assert "".join(event.text for event in first) == output.text
        own = params[number % len(params)]
        if own.constraint is None:
            expected = expected_tokens([number, number + 1], own.max_new_tokens, VOCAB)
            assert list(output.token_ids) == expected[: len(output.token_ids)]
        if output.finish_reason != "cancelled":
            assert len(output.token_ids) == own.max_new_tokens
