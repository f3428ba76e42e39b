"""Sequence and Request: two stations for a token, one final event, readers of every kind."""

import asyncio
import gc
import itertools
import math
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from photon_ext.errors import ConfigError
from photon_ext.runtime import FinishReason
from photon_ext.sampling import Constraint, SamplingParams, from_allowed_ids, from_callable
from photon_ext.engine import Request, Sequence, StreamEvent, TextStream


class Letters:
    """A detokenizer whose tokens are the letters of a text."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def make(stops: tuple[str, ...] = (), constraint: Constraint | None = None) -> Sequence:
    text = TextStream(Letters(), SamplingParams(stop=stops).stop_automaton)
    return Sequence((1, 2), 8, (), 0.0, 0, constraint, text, Request(lambda request: None))


def play(sequence: Sequence, text: str) -> None:
    for letter in text:
        sequence.commit(ord(letter), None)
        if sequence.deliver(ord(letter), is_stop=False):
            sequence.close(FinishReason.STOP)


def test_events_carry_tokens_and_text_and_end_once() -> None:
    sequence = make()
    play(sequence, "ab")
    sequence.close(FinishReason.LENGTH)
    sequence.close(FinishReason.CANCELLED)
    assert list(sequence.request.iter()) == [
        StreamEvent("a", (97,)),
        StreamEvent("b", (98,)),
        StreamEvent("", (), "length"),
    ]
    output = sequence.request.result()
    assert (output.text, output.token_ids, output.finish_reason, output.prompt_tokens) == (
        "ab",
        (97, 98),
        "length",
        2,
    )
    assert output.ttft_ms is not None
    assert output.ttft_ms >= 0


def test_a_stop_string_closes_the_sequence_and_later_tokens_are_not_shown() -> None:
    sequence = make(stops=("END",))
    play(sequence, "hiENDxx")
    events = list(sequence.request.iter())
    assert "".join(event.text for event in events) == sequence.request.result().text == "hi"
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop"]
    assert not any("E" in event.text for event in events), "no part of a stop string is shown"


def test_held_back_text_comes_with_the_final_event() -> None:
    sequence = make(stops=("END",))
    play(sequence, "hiEN")
    sequence.close(FinishReason.LENGTH)
    assert list(sequence.request.iter())[-1] == StreamEvent("EN", (), "length")


def test_the_stop_token_has_no_text_and_is_counted() -> None:
    sequence = make()
    sequence.commit(97, FinishReason.STOP)
    sequence.deliver(97, is_stop=True)
    sequence.close(FinishReason.STOP)
    assert (sequence.request.result().text, sequence.request.result().token_ids) == ("", (97,))


def test_nothing_is_shown_after_the_final_event() -> None:
    sequence = make()
    sequence.commit(97, None)
    sequence.close(FinishReason.CANCELLED)
    assert not sequence.deliver(97, is_stop=False)
    assert list(sequence.request.iter()) == [StreamEvent("", (), "cancelled")]


def test_a_constraint_does_not_hear_of_the_stop_token() -> None:
    """It may be one that the constraint has no state for."""
    heard: list[list[int]] = []
    sequence = make(
        constraint=from_callable(lambda tokens: [97], lambda tokens: bool(heard.append(tokens)))
    )
    assert sequence.commit(97, None) is None
    assert sequence.commit(98, FinishReason.STOP) is FinishReason.STOP
    assert heard == [[97]]


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (None, FinishReason.STOP),
        (FinishReason.LENGTH, FinishReason.STOP),
        (FinishReason.STOP, FinishReason.STOP),
    ],
)
def test_a_finished_constraint_counts_before_the_length_cap(
    verdict: FinishReason | None, expected: FinishReason
) -> None:
    assert make(constraint=from_allowed_ids([{97}])).commit(97, verdict) is expected


def test_an_unfinished_constraint_leaves_the_verdict() -> None:
    sequence = make(constraint=from_allowed_ids([{97}, {97}, {97}]))
    assert sequence.commit(97, None) is None
    assert sequence.commit(97, FinishReason.LENGTH) is FinishReason.LENGTH


def test_result_times_out_with_advice() -> None:
    with pytest.raises(TimeoutError, match="cancel"):
        make().request.result(timeout=0.01)


@pytest.mark.parametrize(
    "timeout",
    [-1, -0.1, math.nan, -math.inf, "1", -(10**5000)],
    ids=lambda value: f"{type(value).__name__}",
)
def test_a_timeout_that_is_no_time_is_refused(timeout: object) -> None:
    with pytest.raises(ConfigError, match=r"timeout is .*; give seconds >= 0, or None"):
        make().request.result(timeout)


@pytest.mark.parametrize(
    "timeout", [math.inf, 10**400, 1e300, None], ids=["infinity", "huge", "large", "none"]
)
def test_a_timeout_may_be_longer_than_any_clock(timeout: float | None) -> None:
    sequence = make()
    threading.Timer(0.05, lambda: sequence.close(FinishReason.LENGTH)).start()
    assert sequence.request.result(timeout).finish_reason == "length"


def test_a_timeout_of_zero_looks_without_waiting() -> None:
    with pytest.raises(TimeoutError):
        make().request.result(0)


@pytest.mark.parametrize(
    "read", [Request.result, lambda request: list(request.iter())], ids=["result", "iter"]
)
@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_in_any_function_of_a_reader_leaves_no_lock_taken(
    read: Callable[[Request], object],
) -> None:
    """A lock that a reader of one request left taken stopped the engine thread at that request's
    next token, and all others with it.

    The places are the begins and ends of Python functions, where Python looks for signals, and
    where conditions and events are torn.
    """

    def interrupted(number: int) -> bool:
        """Whether reading has so many places to be interrupted at."""
        sequence, left, gone = make(), itertools.count(-number), threading.Event()

        def write() -> None:
            while not (
                sequence.request._wakers or sequence.request._end_wakers or gone.wait(0.001)
            ):
                pass  # the reader does not wait yet
            play(sequence, "ab")
            sequence.close(FinishReason.LENGTH)

        def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            if event in ("call", "return") and next(left) == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            read(sequence.request)
        except KeyboardInterrupt:
            return True
        else:
            return False
        finally:
            sys.settrace(before)
            gone.set()
            writer.join(20)
            assert not writer.is_alive(), "it waits for the reader's lock"

    assert next(number for number in itertools.count() if not interrupted(number)) > 10


def test_readers_in_threads_and_coroutines_see_the_same_events() -> None:
    sequence = make()
    seen: list[list[StreamEvent]] = [[], []]
    reader = threading.Thread(target=lambda: seen[0].extend(sequence.request.iter()))
    reader.start()

    async def main() -> None:
        async def read() -> None:
            async for event in sequence.request.stream():
                seen[1].append(event)

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        writer = threading.Thread(
            target=lambda: (play(sequence, "hello"), sequence.close(FinishReason.LENGTH))
        )
        writer.start()
        await asyncio.wait_for(task, 10)
        writer.join()

    asyncio.run(main())
    reader.join(10)
    assert seen[0] == seen[1] == list(sequence.request.iter())
    assert len(seen[0]) == 6


def test_a_reader_whose_event_loop_is_closed_is_forgotten() -> None:
    request = make().request

    def wake() -> None:
        raise RuntimeError("Event loop is closed")

    request._wakers = {wake}
    request.publish("a", 97)
    assert not request._wakers


def test_a_reader_waits_for_no_lock_of_the_engine_thread() -> None:
    """In a fork that thread is gone, and what it held just then would be held for ever: at the
    latest where a reader is dropped.
    """
    sequence = make()
    play(sequence, "ab")
    reader = sequence.request.iter()
    seen = [next(reader)]
    within, go_on = threading.Event(), threading.Event()

    class Stuck(list[int]):
        def append(self, token: int) -> None:
            within.set()
            go_on.wait(20)
            super().append(token)

    def read() -> None:
        seen.append(next(reader))
        reader.close()
        seen.append(next(sequence.request.iter()))

    sequence.request._tokens = Stuck(sequence.request._tokens)
    threads = [
        threading.Thread(target=target, daemon=True)
        for target in (lambda: play(sequence, "c"), read)
    ]
    threads[0].start()
    assert within.wait(20)
    threads[1].start()
    threads[1].join(2)
    stuck = threads[1].is_alive()
    go_on.set()
    threads[0].join(20)
    assert not stuck
    assert [event.text for event in seen] == ["a", "b", "a"]
    assert not sequence.request._wakers


def test_a_reader_that_left_does_not_disturb_the_engine() -> None:
    sequence = make()

    async def leave_early() -> StreamEvent:
        async for event in sequence.request.stream():
            return event
        raise AssertionError("no event")

    play(sequence, "a")
    assert asyncio.run(leave_early()).text == "a"
    play(sequence, "b")
    sequence.close(FinishReason.LENGTH)
    assert sequence.request.result().text == "ab"


def test_tokens_leave_no_objects_that_garbage_collection_looks_at() -> None:
    """Else long answers bring full collections about, which take longer the more there is, and
    stall the loop.
    """
    sequence = make()
    gc.disable()
    try:
        before = len(gc.get_objects())
        play(sequence, "a" * 1000)
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()
    sequence.close(FinishReason.LENGTH)
    events = list(sequence.request.iter())
    assert events[:-1] == [StreamEvent("a", (97,))] * 1000
    assert events[-1].finish_reason == "length"


def test_a_result_is_waited_for_without_being_woken_by_tokens() -> None:
    sequence = make()
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(sequence.request.result(timeout=10).text)
    )
    waiting.start()
    play(sequence, "ab")
    assert waiting.is_alive()
    sequence.close(FinishReason.LENGTH)
    waiting.join(10)
    assert found == ["ab"]
