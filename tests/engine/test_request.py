"""Request: one final event, and readers of every kind, of whom none waits for a lock of the engine
thread.
"""

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

from photon_ext.engine import Request, StreamEvent
from photon_ext.engine.output import End
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.errors import ConfigError
from photon_ext.runtime import FinishReason, TokenLogprobs
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.answer_text import StoppedText, TextReader


class Letters:
    """A detokenizer whose tokens are the letters of a text."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def make(detokenizer: Letters | None = None) -> Request:
    return Request(RequestQueue(), lambda: TextReader(detokenizer or Letters()), 2)


def play(request: Request, text: str) -> None:
    """Tokens as the engine gives them: added, and told to who reads."""
    for letter in text:
        request.add([ord(letter)])
        request.wake()


def close(request: Request, reason: FinishReason = FinishReason.LENGTH) -> None:
    request.finish(End(reason))


def test_events_carry_tokens_and_text_and_end_once() -> None:
    request = make()
    play(request, "ab")
    request.finish(End(FinishReason.LENGTH, "max_new_tokens"))
    assert list(request.iter()) == [
        StreamEvent("a", (97,)),
        StreamEvent("b", (98,)),
        StreamEvent("", (), "length", "max_new_tokens"),
    ]
    output = request.result()
    assert (output.text, output.token_ids, output.finish_reason, output.prompt_tokens) == (
        "ab",
        (97, 98),
        "length",
        2,
    )
    assert output.stop_reason == "max_new_tokens"
    assert output.ttft_ms is not None
    assert output.ttft_ms >= 0


def test_text_that_the_engine_makes_is_what_readers_show() -> None:
    """The engine's, for stop strings: what was held back comes with the final event."""
    text = StoppedText(Letters(), SamplingParams(stop="END").stop_automaton)
    request = Request(RequestQueue(), text=text)
    play(request, "hiEN")
    close(request)
    events = list(request.iter())
    assert [event.text for event in events] == ["h", "i", "", "", "EN"]
    assert request.result().text == "hiEN"


def test_the_stop_token_has_no_text_and_is_counted() -> None:
    request = make()
    request.finish(End(FinishReason.STOP, 97, hides_last=True), [97])
    output = request.result()
    assert (output.text, output.token_ids, output.stop_reason) == ("", (97,), 97)


def test_a_stop_token_that_is_shown_has_its_text_also_where_the_engine_makes_it() -> None:
    text = StoppedText(Letters(), SamplingParams(stop="END").stop_automaton, include_stop=True)
    request = Request(RequestQueue(), text=text, include_stop=True)
    play(request, "hiE")
    request.finish(End(FinishReason.STOP, 33), [33])
    assert [event.text for event in request.iter()] == ["h", "i", "", "E!", ""]


def test_a_last_token_that_is_no_stop_token_has_its_text() -> None:
    request = make()
    request.finish(End(FinishReason.LENGTH), [97])
    assert (request.result().text, request.result().token_ids) == ("a", (97,))


def test_text_that_cannot_be_made_is_an_error_of_its_request_which_is_cancelled() -> None:
    """Whatever the tokenizer raises: it panics with a BaseException."""

    class Panic(BaseException):
        pass

    class Fragile(Letters):
        def push(self, token: int) -> str:
            if token == ord("b"):
                raise Panic("no text")
            return chr(token)

    queue = RequestQueue()
    request = Request(queue, lambda: TextReader(Fragile()))
    request.logprobs += [TokenLogprobs(-float(i), ()) for i in range(3)]
    play(request, "abc")
    events = list(request.iter())
    assert [event.token_ids for event in events] == [(97,), (98,), (99,), ()]
    assert [event.logprobs for event in events] == [*request.logprobs, None]
    assert [event.text for event in events] == ["a", "", "", ""]
    assert events[-1].finish_reason == "error"
    assert events[-1].error == "the text could not be made: Panic: no text"
    assert queue.collect(lambda: True).cancelled == [request]


def test_an_interrupt_of_the_reader_while_it_makes_text_stays_one() -> None:
    class Interrupting(Letters):
        def push(self, token: int) -> str:
            raise KeyboardInterrupt

    request = make(Interrupting())
    play(request, "a")
    with pytest.raises(KeyboardInterrupt):
        next(request.iter())


def test_result_times_out_with_advice() -> None:
    with pytest.raises(TimeoutError, match="cancel"):
        make().result(timeout=0.01)


@pytest.mark.parametrize(
    "timeout",
    [-1, -0.1, math.nan, -math.inf, "1", -(10**5000)],
    ids=lambda value: f"{type(value).__name__}",
)
def test_a_timeout_that_is_no_time_is_refused(timeout: object) -> None:
    with pytest.raises(ConfigError, match=r"timeout is .*; give seconds >= 0, or None"):
        make().result(timeout)


@pytest.mark.parametrize(
    "timeout", [math.inf, 10**400, 1e300, None], ids=["infinity", "huge", "large", "none"]
)
def test_a_timeout_may_be_longer_than_any_clock(timeout: float | None) -> None:
    request = make()
    threading.Timer(0.05, lambda: close(request)).start()
    assert request.result(timeout).finish_reason == "length"


def test_a_timeout_of_zero_looks_without_waiting() -> None:
    with pytest.raises(TimeoutError):
        make().result(0)


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
        request, left, gone = make(), itertools.count(-number), threading.Event()

        def write() -> None:
            while not (request._wakers or request._end_wakers or gone.wait(0.001)):
                pass  # the reader does not wait yet
            play(request, "ab")
            close(request)

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
            read(request)
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
    request = make()
    seen: list[list[StreamEvent]] = [[], []]
    reader = threading.Thread(target=lambda: seen[0].extend(request.iter()))
    reader.start()

    async def main() -> None:
        async def read() -> None:
            async for event in request.stream():
                seen[1].append(event)

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        writer = threading.Thread(target=lambda: (play(request, "hello"), close(request)))
        writer.start()
        await asyncio.wait_for(task, 60)
        writer.join()

    asyncio.run(main())
    reader.join(60)
    assert seen[0] == seen[1] == list(request.iter())
    assert len(seen[0]) == 6


def test_a_reader_whose_event_loop_is_closed_is_forgotten() -> None:
    request = make()

    def wake() -> None:
        raise RuntimeError("Event loop is closed")

    request._wakers = {wake}
    play(request, "a")
    assert not request._wakers


def test_a_reader_waits_for_no_lock_of_the_engine_thread() -> None:
    """In a fork that thread is gone, and what it held just then would be held for ever: at the
    latest where a reader is dropped.
    """
    request = make()
    play(request, "ab")
    reader = request.iter()
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
        seen.append(next(request.iter()))

    request._tokens = Stuck(request._tokens)
    threads = [
        threading.Thread(target=target, daemon=True)
        for target in (lambda: play(request, "c"), read)
    ]
    threads[0].start()
    assert within.wait(20)
    threads[1].start()
    threads[1].join(10)
    stuck = threads[1].is_alive()
    go_on.set()
    threads[0].join(20)
    assert not stuck
    assert [event.text for event in seen] == ["a", "b", "a"]
    assert not request._wakers


def test_a_reader_that_left_does_not_disturb_the_engine() -> None:
    request = make()

    async def leave_early() -> StreamEvent:
        async for event in request.stream():
            return event
        raise AssertionError("no event")

    play(request, "a")
    assert asyncio.run(leave_early()).text == "a"
    play(request, "b")
    close(request)
    assert request.result().text == "ab"


def test_tokens_leave_no_objects_that_garbage_collection_looks_at() -> None:
    """Else long answers bring full collections about, which take longer the more there is, and
    stall the loop.
    """
    request = make()
    gc.disable()
    try:
        before = len(gc.get_objects())
        play(request, "a" * 1000)
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()
    close(request)
    events = list(request.iter())
    assert events[:-1] == [StreamEvent("a", (97,))] * 1000
    assert events[-1].finish_reason == "length"


def test_a_result_is_waited_for_without_being_woken_by_tokens() -> None:
    request = make()
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(request.result(timeout=60).text))
    waiting.start()
    play(request, "ab")
    assert waiting.is_alive()
    close(request)
    waiting.join(60)
    assert found == ["ab"]
