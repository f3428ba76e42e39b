"""The engine loop on the simulated device: order, isolation, cancels, crashes. No model."""

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_ext.engine import Engine, Output, Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.errors import ConfigError, EngineDeadError, RequestError
from photon_ext.runtime import Admission, RowParams
from photon_ext.sampling import SamplingParams, from_allowed_ids, from_callable
from photon_ext.scheduling import Sequence
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
LONG = SamplingParams(max_new_tokens=60)


@contextmanager
def scripted(
    depth: int = 2,
    num_pages: int = 64,
    eos_ids: tuple[int, ...] = (),
    template: str | None = None,
    **sizes: int,
) -> Iterator[Engine]:
    device = WatchedDevice(depth=depth, **sizes)
    with make(device, num_pages, eos_ids, template) as engine:
        yield engine


def make(
    device: WatchedDevice,
    num_pages: int = 64,
    eos_ids: tuple[int, ...] = (),
    template: str | None = None,
) -> Engine:
    return engine_on(device, num_pages, tokenizer=byte_tokenizer(template), eos_ids=eos_ids)


def assert_drained(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.live, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == 64


def assert_alive(engine: Engine) -> None:
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))
    assert list(output.token_ids) == expected_tokens([1, 2, 3], 5, VOCAB)


# --- what comes out -------------------------------------------------------------------------------


@DEPTHS
def test_more_requests_than_rows_are_served_in_order_with_their_own_tokens(depth: int) -> None:
    prompts = [[5], [1, 2, 3], list(range(20)), [9, 9], [7] * 11, [4, 3], [200] * 30]
    with scripted(depth, max_rows=3) as engine:
        outputs = engine.generate(
            prompts, [SamplingParams(max_new_tokens=n) for n in (1, 9, 4, 12, 2, 7, 5)]
        )
        assert_drained_after(engine)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected_tokens(prompt, len(output.token_ids), VOCAB)
    assert [len(output.token_ids) for output in outputs] == [1, 9, 4, 12, 2, 7, 5]
    assert {output.finish_reason for output in outputs} == {"length"}


def assert_drained_after(engine: Engine) -> None:
    """Zombies come back by themselves: after close, which waits for them, rows and pages are all
    accounted for.
    """
    assert_alive(engine)
    engine.close()
    assert_drained(engine)


@DEPTHS
def test_an_end_token_stops_and_stays_in_the_ids_but_not_in_the_text(depth: int) -> None:
    tokens = expected_tokens([1, 2, 3], 6, VOCAB)
    with scripted(depth, eos_ids=(tokens[3],)) as engine:
        stopped, ignored = engine.generate(
            [[1, 2, 3]] * 2,
            [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=6, ignore_eos=True)],
        )
        tokenizer = engine.tokenizer
    assert (list(stopped.token_ids), stopped.finish_reason) == (tokens[:4], "stop")
    assert stopped.text == tokenizer.decode(tokens[:3])
    assert (list(ignored.token_ids), ignored.finish_reason) == (tokens, "length")


@DEPTHS
def test_a_stop_string_ends_text_and_tokens_at_the_same_place(depth: int) -> None:
    tokens = expected_tokens([1, 2, 3], 8, VOCAB)
    text = byte_tokenizer().decode(tokens)
    at = next(i for i in range(2, len(text) - 1) if "\ufffd" not in text[i : i + 2])
    with scripted(depth) as engine:
        (output,) = engine.generate(
            [[1, 2, 3]], SamplingParams(max_new_tokens=8, stop=(text[at : at + 2],))
        )
    assert output.finish_reason == "stop"
    assert output.text == text[: text.index(text[at : at + 2])]
    assert list(output.token_ids) == tokens[: len(output.token_ids)]
    assert len(output.token_ids) < 8


@DEPTHS
def test_streamed_pieces_add_up_to_the_text(depth: int) -> None:
    with scripted(depth) as engine:
        requests = [
            engine.submit([prompt], SamplingParams(max_new_tokens=20)) for prompt in range(3)
        ]

        async def read(request: Request) -> str:
            return "".join([event.text async for event in request.stream()])

        async def read_all() -> list[str]:
            return await asyncio.wait_for(asyncio.gather(*map(read, requests)), 20)

        texts = asyncio.run(read_all())
        for prompt, request, text in zip(range(3), requests, texts, strict=True):
            assert (
                text
                == request.result().text
                == byte_tokenizer().decode(expected_tokens([prompt], 20, VOCAB))
            )


def test_a_string_is_a_user_message_unless_raw() -> None:
    with scripted(
        template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ) as engine:
        encode = engine.tokenizer.encode
        chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
        outputs = engine.generate(["hi", chat], SamplingParams(max_new_tokens=3)) + engine.generate(
            ["hi"], SamplingParams(max_new_tokens=3), raw=True
        )
    for output, text in zip(outputs, ("<user>hi", "<system>x<user>hi", "hi"), strict=True):
        assert list(output.token_ids) == expected_tokens(encode(text), 3, VOCAB)


def test_a_seed_repeats_and_none_does_not() -> None:
    with scripted() as engine:
        once, again, other, fresh, fresh_again = engine.generate(
            [[1, 2]] * 5,
            [
                SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed)
                for seed in (5, 5, 6, None, None)
            ],
        )
    assert once.token_ids == again.token_ids != other.token_ids
    assert fresh.token_ids != fresh_again.token_ids


def test_pages_that_do_not_suffice_for_all_make_the_rest_wait() -> None:
    prompts = [[i] * 10 for i in range(6)]
    with scripted(num_pages=9) as engine:  # each request holds 4 pages
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=5))
    assert [list(o.token_ids) for o in outputs] == [expected_tokens(p, 5, VOCAB) for p in prompts]


# --- depth does not show --------------------------------------------------------------------------


REQUEST = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),  # prompt
    st.integers(1, 12),  # max_new_tokens
    st.lists(st.integers(0, VOCAB - 1), max_size=3),  # stop ids
    st.sampled_from(["free", "letters", "positions", "raises", "nothing"]),
    st.one_of(st.none(), st.integers(1, 12)),  # cancel at this launch
)


def constraint_of(kind: str) -> object:
    def raises(tokens: list[int]) -> list[int]:
        if len(tokens) == 2:
            raise RuntimeError("out of grammar")
        return [1, 2, 3]

    makers: dict[str, Callable[[], object]] = {
        "free": lambda: None,
        "letters": lambda: from_allowed_ids(range(60, 90)),
        "positions": lambda: from_allowed_ids([{1, 2}, {3}, {4, 5, 6}, {7, 8}]),
        "raises": lambda: from_callable(raises),
        "nothing": lambda: from_allowed_ids([{1}, {2, 3}, set()]),
    }
    return makers[kind]()


def outcome(requests: list[tuple], depth: int, with_cancels: bool) -> list[Output]:
    device = WatchedDevice(depth=depth, max_rows=3)
    with make(device) as engine:
        handles: list[Request] = []
        ready = threading.Event()

        def cancel_on_time() -> None:
            ready.wait(20)
            for handle, request in zip(handles, requests, strict=True):
                if with_cancels and request[4] == device.launches:
                    handle.cancel()

        device.on_step = cancel_on_time
        for prompt, count, stops, kind, _ in requests:
            params = SamplingParams(
                max_new_tokens=count, stop_token_ids=tuple(stops), constraint=constraint_of(kind)
            )
            handles.append(engine.submit(prompt, params))
        ready.set()
        outputs = [handle.result(20) for handle in handles]
        for handle in handles:
            assert sum(event.finish_reason is not None for event in handle.iter()) == 1, (
                "one final event"
            )
        device.on_step = lambda: None
        assert_drained_after(engine)
        return outputs


@settings(max_examples=40)
@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_depth_two_equals_depth_one_with_stops_caps_constraints_and_cancels(
    requests: list[tuple],
) -> None:
    undisturbed = outcome(requests, 1, with_cancels=False)
    summary = [(o.token_ids, o.text, o.finish_reason, o.error) for o in undisturbed]
    assert [
        (o.token_ids, o.text, o.finish_reason, o.error)
        for o in outcome(requests, 2, with_cancels=False)
    ] == summary
    for depth in (1, 2):
        for request, calm, cancelled in zip(
            requests, undisturbed, outcome(requests, depth, with_cancels=True), strict=True
        ):
            if cancelled.finish_reason == "cancelled":
                assert request[4] is not None
                assert cancelled.token_ids == calm.token_ids[: len(cancelled.token_ids)]
            else:
                assert (cancelled.token_ids, cancelled.text) == (calm.token_ids, calm.text)


# --- one bad request fails alone ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([1, 256], {}, "the prompt holds 256; token ids of this model are 0 to 255"),
        ([1, -1], {}, "the prompt holds -1; token ids"),
        ([1, "a"], {}, "'a', which is no token id"),
        (None, {}, "the prompt is a NoneType"),
        (b"bytes", {}, "the prompt is a bytes"),
        ([1] * 65, {}, "the prompt has 65 tokens and the context holds 64"),
        ([{"role": "user", "content": "hi"}], {}, "no chat template"),
        ([1], {"stop_token_ids": (300,)}, "stop_token_ids holds 300"),
        ([1], {"stop_token_ids": (1, 2, 3, 4, 5)}, "5 stop token ids"),
    ],
)
def test_bad_input_is_refused_at_submit_and_the_engine_goes_on(
    prompt: object, options: dict, message: str
) -> None:
    with scripted() as engine:
        running = engine.submit([7, 8], SamplingParams(max_new_tokens=30))
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, SamplingParams(**options))
        assert list(running.result(20).token_ids) == expected_tokens([7, 8], 30, VOCAB)
        assert_alive(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ({1}, None, "prompts is a set; give a list or an iterator"),
        ([[1], []], None, "prompt 1: the prompt is empty"),
        ([[1], [2]], [SamplingParams()], "1 sampling params for 2 prompts"),
        ([[1]], 0.7, "params is a float"),
        ([[1], [2]], [SamplingParams(), 0.7], "prompt 1: params is a float; give SamplingParams"),
    ],
)
def test_generate_refuses_before_anything_is_queued(
    prompts: object, params: object, message: str
) -> None:
    with scripted() as engine:
        with pytest.raises((ConfigError, RequestError), match=message):
            engine.generate(prompts, params)
        assert engine.stats().steps == 0
        assert_alive(engine)


def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    with scripted(num_pages=5) as engine:
        with pytest.raises(RequestError, match="the pool has 5"):
            engine.submit([1] * 18, SamplingParams(max_new_tokens=20))
        assert_alive(engine)


@DEPTHS
@pytest.mark.parametrize(
    ("constraint", "tokens", "error"),
    [
        (from_allowed_ids([]), 0, "the constraint allows nothing"),
        (from_allowed_ids([{5}, set()]), 1, "the constraint allows nothing"),
        (from_callable(lambda tokens: [1 // (2 - len(tokens))]), 2, "ZeroDivisionError"),
        (from_callable(lambda tokens: [999]), 0, "constraint allows token id 999"),
        (from_callable(lambda tokens: None), 0, "constraint allows None; give a list"),
    ],
)
def test_a_faulty_constraint_ends_its_own_request_only(
    depth: int, constraint: object, tokens: int, error: str
) -> None:
    with scripted(depth) as engine:
        good, bad, other = engine.generate(
            [[1, 2], [3, 4], [5, 6]],
            [
                SamplingParams(max_new_tokens=10),
                SamplingParams(max_new_tokens=10, constraint=constraint),
                SamplingParams(max_new_tokens=10, constraint=from_allowed_ids(range(VOCAB))),
            ],
        )
        assert (bad.finish_reason, len(bad.token_ids)) == ("error", tokens)
        assert error in (bad.error or "")
        assert list(good.token_ids) == expected_tokens([1, 2], 10, VOCAB)
        assert (other.finish_reason, len(other.token_ids)) == ("length", 10)
        assert_alive(engine)


class Brittle:
    """A constraint of the caller's own, without fresh(), that raises in `advance` or in
    `finished`.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def finished(self) -> bool:
        if self.where == "finished":
            raise KeyError("finished")
        return False

    def advance(self, token: int) -> None:
        if self.where == "advance":
            raise KeyError("advance")

    def fill_bitmask(self, words: memoryview) -> None:
        words[0] = 0b1110


def test_a_constraint_object_serves_one_request_at_a_time() -> None:
    params = SamplingParams(max_new_tokens=4, constraint=Brittle(""))
    with scripted() as engine:
        with pytest.raises(RequestError, match="already serves another request"):
            engine.generate([[1], [2]], params)
        assert len(engine.generate([[1]], params)[0].token_ids) == 4
        assert len(engine.generate([[2]], params)[0].token_ids) == 4, (
            "it is free again after the first request"
        )


# --- cancels, ends and crashes --------------------------------------------------------------------


@DEPTHS
def test_cancel_reaches_waiting_and_running_requests_and_is_idempotent(depth: int) -> None:
    device = WatchedDevice(depth=depth, max_rows=1)
    launched, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if device.launches == 3:
            launched.set()
            go_on.wait(20)

    device.on_step = hold
    with make(device) as engine:
        running, waiting, after = (
            engine.submit([n], SamplingParams(max_new_tokens=40)) for n in (1, 2, 3)
        )
        assert launched.wait(20)
        for request in (running, waiting, running):
            request.cancel()
        go_on.set()
        assert [r.result(20).finish_reason for r in (running, waiting, after)] == [
            "cancelled",
            "cancelled",
            "length",
        ]
        assert running.result().token_ids
        assert waiting.result().token_ids == ()
        assert waiting.result().ttft_ms is None
        after.cancel()
        assert after.result().finish_reason == "length"
        assert_drained_after(engine)


class Dots:
    """A detokenizer for which every token is a dot."""

    def push(self, token: int) -> str:
        return "."

    def flush(self) -> str:
        return ""


class Fragile:
    """A detokenizer that raises on the third token."""

    def __init__(self) -> None:
        self.tokens = 0

    def push(self, token: int) -> str:
        self.tokens += 1
        return "." if self.tokens < 3 else str(1 // 0)

    def flush(self) -> str:
        return ""


@DEPTHS
@pytest.mark.parametrize("how", ["cancel", "stop string", "finished", "advance", "text"])
def test_what_ends_early_is_not_decoded_on(depth: int, how: str) -> None:
    """Its row is free for the next request after the steps that are in flight, not at its cap."""
    device = WatchedDevice(depth=depth, max_rows=1)
    params = {
        "stop string": SamplingParams(max_new_tokens=60, stop=("...",)),
        "text": SamplingParams(max_new_tokens=60, stop=("never",)),
        "finished": SamplingParams(
            max_new_tokens=60,
            constraint=from_callable(lambda tokens: [1, 2], lambda tokens: len(tokens) == 3),
        ),
        "advance": SamplingParams(max_new_tokens=60, constraint=Brittle("advance")),
    }
    requests: list[Request] = []
    ready = threading.Event()

    def cancel_on_time() -> None:
        if how == "cancel" and device.launches == 3:
            ready.wait(20)
            requests[0].cancel()

    with make(device) as engine:
        detokenizer = engine.tokenizer.detokenizer
        engine.tokenizer.detokenizer = Fragile if how == "text" else Dots
        device.on_step = cancel_on_time
        requests.append(engine.submit([1], params.get(how, LONG)))
        ready.set()
        requests[0].result(20)
        engine.tokenizer.detokenizer = detokenizer
        assert_drained_after(engine)
    assert device.launches <= 4 + depth + 5, (
        "those of the request, those in flight when it ended, and those of the next one"
    )


class Interrupted:
    """Posts sequences as the engine does, then behaves as if Ctrl-C came at once; remembers what
    was posted.
    """

    def __init__(self, engine: Engine) -> None:
        self.post = engine._post
        self.requests: list[Request] = []

    def __call__(self, sequences: list[Sequence]) -> None:
        self.requests = [sequence.sink for sequence in sequences]
        self.post(sequences)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "call",
    [lambda e: e.generate([[1], [2], [3]], LONG), lambda e: e.submit([1], LONG)],
    ids=["generate", "submit"],
)
def test_an_interrupt_right_after_queueing_cancels_the_requests(
    call: Callable[[Engine], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, go_on = WatchedDevice(max_rows=1), threading.Event()
    device.on_step = lambda: go_on.wait(20)
    with make(device) as engine:
        interrupted = Interrupted(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_post", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(engine)
        go_on.set()
        assert interrupted.requests
        assert {request.result(20).finish_reason for request in interrupted.requests} == {
            "cancelled"
        }
        assert_drained_after(engine)


def test_an_interrupt_before_a_request_is_queued_frees_its_place_and_its_constraint() -> None:
    class Interrupting(SimpleQueue[Any]):
        left = 1

        def put(self, *args: Any) -> None:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt
            super().put(*args)

    with engine_on(WatchedDevice(max_rows=1), max_waiting=0) as engine:
        own = SamplingParams(max_new_tokens=4, constraint=Brittle(""))
        engine._queue._arrived = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            engine.submit([1], own)
        begin = time.monotonic()
        while engine.stats().live and time.monotonic() < begin + 20:
            time.sleep(0.001)
        assert engine.submit([1], own).result(20).finish_reason == "length"


def test_a_thread_that_does_not_start_fails_that_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for again in (False, True):
        engine = make(WatchedDevice())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engine.submit([9])
        if again:
            assert_alive(engine)
            assert engine.stats().live == 0, "what was queued in vain has been cancelled"
        engine.close()


def test_a_start_that_was_interrupted_and_made_a_thread_all_the_same_leaves_one_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, while the first request waits for its thread to run: the next request starts one,
    too.
    """
    start = threading.Thread.start
    begun = threading.Event()

    def late(thread: threading.Thread) -> None:
        run, thread.run = thread.run, lambda: begun.wait(20) and run()  # type: ignore[method-assign]
        start(thread)
        monkeypatch.setattr(thread, "_ident", None)  # as it is until the thread runs
        raise KeyboardInterrupt

    engine = make(WatchedDevice())
    monkeypatch.setattr(threading.Thread, "start", late)
    with pytest.raises(KeyboardInterrupt):
        engine.submit([9])
    monkeypatch.setattr(threading.Thread, "start", start)
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5))
    monkeypatch.undo()
    begun.set()
    assert list(request.result(20).token_ids) == expected_tokens([1, 2, 3], 5, VOCAB)
    assert not engine._loop.run()
    assert_alive(engine)
    engine.close()
    assert not any(thread.runs for thread in engine._thread._threads)


@pytest.mark.parametrize("crash", [False, True], ids=["closed", "crashed"])
def test_an_engine_that_ends_while_a_request_is_submitted_is_kept_by_nobody(crash: bool) -> None:
    """The caller finds no thread that is alive, starts one more, and has the end of the process
    close the engine.
    """

    def ended() -> weakref.ref[Engine]:
        engine = make(WatchedDevice())
        assert_alive(engine)
        post = engine._post

        def late(sequences: list[Sequence]) -> None:
            if crash:
                post([engine._input.make([9], LONG, False, RequestOptions())])
            else:
                engine._queue.close()
            engine._thread._threads[0].join(20)
            post(sequences)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_post", late)
            if crash:
                patch.setattr(engine._pipeline, "launch", lambda plan: 1 // 0)
            with pytest.raises(EngineDeadError, match="crashed" if crash else "closed"):
                engine.submit([9])
            engine._thread.join()
        return weakref.ref(engine)

    kept = ended()
    gc.collect()
    assert kept() is None


def test_an_idle_engine_keeps_no_request_that_has_ended() -> None:
    with make(WatchedDevice()) as engine:

        def ended() -> list[weakref.ref[Request]]:
            requests = [engine.submit([9], SamplingParams(max_new_tokens=4)) for _ in range(3)]
            return [weakref.ref(request) for request in requests if request.result(20)]

        kept, deadline = ended(), time.monotonic() + 20
        while any(one() for one in kept) and time.monotonic() < deadline:
            time.sleep(0.01)  # rows are released behind the ends
            gc.collect()
        assert [one() for one in kept] == [None] * 3


def test_a_closed_engine_whose_first_start_failed_has_no_cycles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(WatchedDevice())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit([9])
    assert_alive(engine)
    engine.close()
    kept = weakref.ref(engine)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


def test_a_signal_handler_may_close_the_engine_while_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs on the thread that it interrupts, which waits for the engine thread to run."""
    engine = make(WatchedDevice())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "photon-engine":
            engine.close()

    def submit() -> None:
        with pytest.raises(EngineDeadError, match="closed"):
            engine.submit([9])
        ended.set()

    ended = threading.Event()
    caller = threading.Thread(target=submit, daemon=True)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    caller.start()
    assert ended.wait(30), "it waits for a lock that its own thread has taken"


def test_close_cancels_what_is_left_and_refuses_what_comes() -> None:
    device = WatchedDevice(max_rows=1)
    launched = threading.Event()
    device.on_step = launched.set
    engine = make(device)
    requests = [engine.submit([n], SamplingParams(max_new_tokens=50)) for n in range(3)]
    assert launched.wait(20)
    engine.close()
    engine.close()
    assert {request.result(0).finish_reason for request in requests} <= {"cancelled", "length"}
    # the steps in flight, which nobody hears of any more, have given row and pages back
    assert_drained(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit([1])


def test_a_close_after_one_that_was_interrupted_waits_all_the_same() -> None:
    """Ctrl-C in a thread's own join would have the next one return at once."""
    device, launched, go_on = WatchedDevice(max_rows=1), threading.Event(), threading.Event()

    def hold() -> None:
        launched.set()
        go_on.wait(20)

    device.on_step = hold
    engine = make(device)
    engine.submit([9], LONG)
    assert launched.wait(20)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    caller = threading.get_ident()

    def interrupt() -> None:
        while not engine._queue._closing:
            time.sleep(0.001)
        time.sleep(0.2)  # it waits for the engine thread now
        signal.pthread_kill(caller, signal.SIGUSR1)

    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    again = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
    for thread in again:
        thread.start()
    again[0].join(0.2)
    assert all(thread.is_alive() for thread in again)
    go_on.set()
    for thread in again:
        thread.join(20)
    assert not any(thread.is_alive() for thread in again)
    assert_drained(engine)


def test_close_before_the_first_request() -> None:
    engine = make(WatchedDevice())
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate([[1]])


def test_a_crash_fails_every_open_request_with_the_cause() -> None:
    device = WatchedDevice(max_rows=2)

    def crash() -> None:
        if device.launches == 4:
            raise OSError("the device fell off the bus")

    device.on_step = crash
    engine = make(device)
    outputs = engine.generate([[n] for n in range(5)], SamplingParams(max_new_tokens=20))
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("fell off the bus" in (output.error or "") for output in outputs)
    with pytest.raises(EngineDeadError, match="fell off the bus") as raised:
        engine.submit([1])
    assert isinstance(raised.value.__cause__, OSError)
    engine.close()


def test_a_request_that_the_pipeline_refuses_ends_alone_and_gives_its_pages_back() -> None:
    """Whatever is wrong shows at submit; what is overlooked there is still no reason to stop the
    others.
    """
    with scripted() as engine:
        overlooked = engine._input.make([1, 2], LONG, False, RequestOptions())
        overlooked.admission = Admission((1, 2), RowParams(max_new_tokens=64))
        engine._post([overlooked])
        output = overlooked.sink.result(20)
        assert (output.finish_reason, output.token_ids) == ("error", ())
        assert "17 pages given; this request needs 1, and a row holds 16 at most" in (
            output.error or ""
        )
        assert_drained_after(engine)


def test_requests_that_can_never_be_let_in_are_told_so() -> None:
    """Pages that nobody gives back are a bug of ours, and the callers do not wait for ever."""
    with scripted() as engine:
        assert engine._scheduler.pool.allocate(60) is not None
        assert "1 requests wait, and no row runs" in (
            engine.submit([1], LONG).result(20).error or ""
        )


@DEPTHS
def test_a_crash_is_told_to_whoever_is_between_two_lists(depth: int) -> None:
    """One request has ended, and its final event is not delivered yet; another was posted, and
    nobody took it.
    """
    device = WatchedDevice(depth=depth)
    requests: list[Request] = []
    ready = threading.Event()

    def act() -> None:
        ready.wait(20)
        if device.launches == 3:
            requests[0].cancel()  # the next turn takes it, and launches before it delivers
        if device.launches == 4:
            requests.append(engine.submit([9]))
            raise OSError("the device fell off the bus")

    device.on_step = act
    engine = make(device)
    requests += [engine.submit([n], LONG) for n in range(2)]
    ready.set()
    for request in requests[:2]:
        request.result(20)
    assert len(requests) == 3
    assert ["fell off the bus" in (request.result(20).error or "") for request in requests] == [
        True
    ] * 3
    engine.close()


def test_a_crash_between_two_requests_that_came_together_is_told_to_both() -> None:
    engine = make(WatchedDevice())
    made = [engine._input.make([n], LONG, False, RequestOptions()) for n in range(3)]
    made[0].key, made[1].key = (1,), ("what no policy may return",)  # type: ignore[assignment]
    engine._post(made)
    for sequence in made:
        assert "not supported between" in (sequence.sink.result(20).error or "")
    engine.close()


def test_text_of_the_loop_is_delivered_after_the_next_launch() -> None:
    """Where the loop makes it, for stop strings: at depth 2 a token is shown while the step after
    its successor's launch runs, never before that launch.
    """
    for depth in (1, 2):
        device = WatchedDevice(depth=depth)
        launches_at_token: list[int] = []
        with make(device) as engine:
            engine.tokenizer.detokenizer = lambda device=device, seen=launches_at_token: Recorder(
                device, seen
            )
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=6, stop=("never",)))
        # Token n is sampled by launch n + 1 (the prefill samples token 0); the launch after it
        # comes first, until there is none.
        assert launches_at_token == [2, 3, 4, 5, 6, 6]


class Recorder:
    """A detokenizer that notes how many steps were launched when each token came."""

    def __init__(self, device: WatchedDevice, seen: list[int]) -> None:
        self.device, self.seen = device, seen

    def push(self, token: int) -> str:
        self.seen.append(self.device.launches)
        return ""

    def flush(self) -> str:
        return ""


def test_host_time_is_split_by_phase() -> None:
    with scripted() as engine:
        assert_alive(engine)
        stats = engine.stats()
    assert set(stats.host_us) == {
        "admit",
        "plan",
        "launch",
        "commit",
        "finalize",
        "deliver",
    }
    assert stats.host_us["launch"] > 0
    assert (stats.steps, stats.decode_steps, stats.depth) == (5, 4, 2)


@DEPTHS
def test_a_cancel_before_a_request_is_queued_is_not_lost(depth: int) -> None:
    """The engine thread took the cancel first, and found nobody of that name."""

    def leave(requests: Seq[Request]) -> None:
        requests[0].cancel()
        time.sleep(0.05)  # the engine thread, which has nothing to do, takes it now

    with scripted(depth) as engine:
        assert engine.generate([[1]], SamplingParams(max_new_tokens=1))  # so that it runs
        left = engine.submit([1, 2], LONG, announce=leave)
        assert left.result(20).finish_reason == "cancelled"
        assert not left.result().token_ids
        assert engine.stats().live == 0


def test_who_is_cancelled_while_being_queued_gets_no_row() -> None:
    """Found by its name before it comes to the scheduler, it waited once more, and ran."""
    engine = make(WatchedDevice(depth=2))
    sequence = engine._input.make([1, 2], LONG, False, RequestOptions())
    engine._scheduler.registry.add([sequence])
    sequence.sink.cancel()
    engine._loop._collect()
    engine._queue._arrived.put((sequence,))
    engine._loop._collect()
    assert (sequence.ended, engine.waiting) == (True, 0)
    engine._loop._turn()
    assert sequence.sink.result(0.0).finish_reason == "cancelled"
    engine.close()
