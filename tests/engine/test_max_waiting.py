"""A bounded queue, and the policy by which an engine empties it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from photon_ext.engine import Engine, EngineOptions, Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.errors import ConfigError, QueueFull, RequestError
from photon_ext.sampling import SamplingParams, bad_words
from photon_ext.scheduling import Sequence
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

SHORT = SamplingParams(max_new_tokens=4)
ALIVE = tuple(expected_tokens([1, 2], 4, VOCAB))


@contextmanager
def held(**options: Any) -> Iterator[tuple[Engine, threading.Event]]:
    """An engine of one row whose device stands still until the event is set."""
    device, go_on = WatchedDevice(max_rows=1), threading.Event()
    device.on_step = lambda: go_on.wait(20) and None
    with engine_on(device, num_pages=16, **options) as engine:
        try:
            yield engine, go_on
        finally:
            go_on.set()


def until_it_has_its_row(engine: Engine) -> None:
    """From then on the engine thread stands still, and ends nobody."""
    while engine.stats().rows_held == 0:
        time.sleep(0.001)


def assert_alive(engine: Engine) -> None:
    assert engine.submit([1, 2], SHORT).result(20).token_ids == ALIVE


# --- max_waiting ----------------------------------------------------------------------------------


def test_hazard_30_a_full_queue_refuses_one_more_and_serves_the_others() -> None:
    with held(max_waiting=2) as (engine, go_on):
        taken = [engine.submit([1, 2], SHORT) for _ in range(3)]
        with pytest.raises(
            QueueFull,
            match=r"^the queue is full: 3 requests run or wait, one more would exceed the 3 that "
            r"this engine takes \(max_rows \+ max_waiting\); try again when .* larger max_waiting$",
        ) as raised:
            engine.submit([1, 2], SHORT)
        assert isinstance(raised.value, RequestError)
        go_on.set()
        assert [request.result(20).token_ids for request in taken] == [ALIVE] * 3
        assert_alive(engine)
        assert engine.stats().refusals == 1


def test_generate_is_taken_whole_or_not_at_all() -> None:
    with held(max_waiting=2) as (engine, go_on):
        first = engine.submit([1, 2], SHORT)
        with pytest.raises(QueueFull, match="1 requests run or wait, 3 more would exceed the 3"):
            engine.generate([[1, 2]] * 3, SHORT)
        assert engine.stats().refusals == 3
        go_on.set()
        assert first.result(20).token_ids == ALIVE
        assert [output.token_ids for output in engine.generate([[1, 2]] * 3, SHORT)] == [ALIVE] * 3


@pytest.mark.parametrize("many", [False, True], ids=["submit", "generate"])
def test_nothing_is_encoded_for_whom_the_queue_has_no_room(many: bool) -> None:
    """Sixteen thousand answers, each with its bad words, took gigabytes before a refusal."""
    tokenizer = byte_tokenizer()
    words = SamplingParams(bad_words=["never", "ever"])
    with held(max_waiting=2, tokenizer=tokenizer) as (engine, _):
        engine.submit([1, 2], SHORT)
        ask = partial(engine.submit, "text", n=16384)
        if many:
            ask = partial(engine.generate, ["text"] * 2, n=8192)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "encode", lambda *_: pytest.fail("something was encoded"))
            with pytest.raises(QueueFull, match="1 requests run or wait, 16384 more would exceed"):
                ask(params=words)
        assert engine.stats().refusals == 16384


def test_the_answers_to_a_prompt_share_what_their_bad_words_come_to() -> None:
    tokenizer, made = byte_tokenizer(), []
    with held(tokenizer=tokenizer) as (engine, _), pytest.MonkeyPatch.context() as patch:
        original = bad_words.Endings
        patch.setattr(bad_words, "Endings", lambda each: made.append(1) or original(each))
        words = SamplingParams(bad_words=["never", "ever"], max_new_tokens=2)
        for _ in range(2):
            engine.submit([1, 2], words, n=64)
        for request in engine.submit([1, 2], words, n=4):
            request.cancel()
    assert made == [1]


def test_the_answers_to_a_prompt_share_its_ids() -> None:
    with held() as (engine, _):
        options = RequestOptions()
        made = engine._input.make_answers([1, 2, 3], SHORT, False, options, 3)
        assert len({id(sequence.admission.prompt_ids) for sequence in made}) == 1


def test_without_places_to_wait_there_are_those_of_the_rows() -> None:
    with held(max_waiting=0) as (engine, go_on):
        running = engine.submit([1, 2], SHORT)
        with pytest.raises(QueueFull):
            engine.submit([1, 2], SHORT)
        go_on.set()
        assert running.result(20).token_ids == ALIVE
        assert_alive(engine)


@pytest.mark.parametrize("how", ["cancel", "timeout", "refused constraint"])
def test_a_place_is_free_again_however_its_request_ends(how: str) -> None:
    class Own:
        finished = False

        def advance(self, token: int) -> None: ...

        def fill_bitmask(self, words: memoryview) -> None:
            words[0] = 2

    own = SamplingParams(max_new_tokens=4, constraint=Own())
    with held(max_waiting=1) as (engine, go_on):
        running = engine.submit([1, 2], own)
        until_it_has_its_row(engine)
        if how == "refused constraint":
            with pytest.raises(RequestError, match="already serves another request"):
                engine.submit([1, 2], own)
        else:
            waiting = engine.submit([1, 2], SHORT, timeout_s=0 if how == "timeout" else None)
            with pytest.raises(QueueFull):
                engine.submit([1, 2], SHORT)
            waiting.cancel()
        go_on.set()
        assert len(running.result(20).token_ids) == 4
        for _ in range(3):
            assert_alive(engine)


def test_many_threads_on_a_full_queue_take_each_place_once() -> None:
    taken: list[Request] = []
    refused: list[QueueFull] = []

    def hammer() -> None:
        for _ in range(100):
            try:
                taken.append(engine.submit([1, 2], SHORT))
            except QueueFull as error:
                refused.append(error)

    with held(max_waiting=10) as (engine, go_on):
        threads = [threading.Thread(target=hammer) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len(refused)) == (11, 1589)
        assert engine.stats().refusals == 1589
        assert engine._queue._arrived.qsize() <= 11, "what was refused leaves nothing there"
        go_on.set()
        assert {request.result(20).token_ids for request in taken} == {ALIVE}
        assert_alive(engine)


def test_many_threads_on_an_engine_at_work_never_exceed_its_places() -> None:
    device, most = WatchedDevice(max_rows=2), [0]
    ends: list[Request] = []

    def hammer() -> None:
        for _ in range(60):
            with suppress(QueueFull):
                ends.append(engine.submit([1, 2], SHORT))

    with engine_on(device, num_pages=32, max_waiting=3) as engine:
        device.on_step = lambda: most.append(len(engine._scheduler.registry))
        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outputs = [request.result(20) for request in ends]
        assert {output.token_ids for output in outputs} == {ALIVE}
        assert max(most) <= 5
        assert len(ends) + engine.stats().refusals == 480
        engine.close()
        assert (engine.stats().live, engine.stats().pages_held) == (0, 0)
        assert not len(engine._scheduler.registry)


def test_without_a_bound_everybody_waits() -> None:
    with held() as (engine, go_on):
        requests = [engine.submit([1, 2], SHORT) for _ in range(50)]
        go_on.set()
        assert {request.result(20).token_ids for request in requests} == {ALIVE}
        assert engine.stats().refusals == 0


@pytest.mark.parametrize("max_waiting", [-1, 1.5, True, "8", 2**31])
def test_a_bound_that_is_none_is_refused(max_waiting: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_waiting is .*; give an integer from 0 to 2147483"):
        EngineOptions(max_waiting=max_waiting)
    with pytest.raises(ConfigError, match=r"^max_waiting is"):
        engine_on(WatchedDevice(), max_waiting=max_waiting)


# --- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [("first-come", [0, 1, 2, 3]), ("shortest-prompt", [2, 3, 0, 1]), ("priority", [1, 3, 0, 2])],
)
def test_an_engine_serves_those_that_wait_in_the_order_of_its_policy(
    policy: str, order: list[int]
) -> None:
    told: list[int] = []
    with held(policy=policy) as (engine, go_on):
        engine.listen(lambda output: told.extend(one.id for one in output.ends))
        running = engine.submit([1, 2], SHORT)
        until_it_has_its_row(engine)
        waiting = [
            engine.submit([1] * length, SHORT, priority=priority)
            for length, priority in ((5, 0), (6, 2), (1, 0), (2, 1))
        ]
        go_on.set()
        for request in waiting:
            assert request.result(20).finish_reason == "length"
    assert told == [running.id, *(waiting[i].id for i in order)]


def test_generate_and_chat_have_a_priority_too() -> None:
    seen: list[int] = []

    class Own:
        def key(self, sequence: Sequence) -> tuple[int]:
            seen.append(sequence.priority)
            return (0,)

    with engine_on(WatchedDevice(), policy=Own()) as engine:
        engine.generate([[1], [2]], SHORT, priority=-3)
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.chat([{"role": "user", "content": "x"}], SHORT, priority=7)
    assert seen == [-3, -3]


def test_hazard_30_a_policy_that_fails_on_one_request_fails_that_one() -> None:
    class Brittle:
        def key(self, sequence: Sequence) -> tuple[float, ...]:
            return (1 / sequence.priority,)

    with engine_on(WatchedDevice(), policy=Brittle()) as engine:
        good = engine.submit([1, 2], SHORT, priority=2)
        with pytest.raises(RequestError, match="policy Brittle raised ZeroDivisionError"):
            engine.submit([1, 2], SHORT, priority=0)
        assert good.result(20).token_ids == ALIVE


def test_a_policy_that_is_none_is_refused_before_anything_is_made() -> None:
    for make in (
        lambda: EngineOptions(policy="lottery"),
        lambda: engine_on(WatchedDevice(), policy="lottery"),
    ):
        with pytest.raises(ConfigError, match=r"^policy is 'lottery'; give 'first-come', "):
            make()
