"""Deadlines: one final event, wherever a request is when it passes, and nobody else is hurt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from photon_ext.engine import Engine, Request, StepOutput
from photon_ext.errors import ConfigError
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
LONG = 60
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SOON = 1e6  # a deadline that the clock of these tests reaches when they say so
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "constrained": lambda: {"constraint": from_allowed_ids(range(VOCAB))},
    "stop string": lambda: {"stop": ("never to be seen",)},
}
KIND = pytest.mark.parametrize("kind", list(KINDS))


class Served:
    """An engine on a simulated device whose deadlines pass when `passes` returns true."""

    def __init__(self, depth: int, max_rows: int, **options: Any) -> None:
        self.device = WatchedDevice(depth=depth, max_rows=max_rows)
        self.passes: Callable[[], bool] = lambda: False
        tokenizer = byte_tokenizer(TEMPLATE)
        pages = 16 * max_rows  # as many as the toy model has
        self.engine: Engine = engine_on(self.device, pages, tokenizer=tokenizer, **options)
        self.engine._loop._deadlines.clock = lambda: math.inf if self.passes() else 0.0

    def after(self, launches: int) -> None:
        """Deadlines pass from this launch on."""
        self.passes = lambda: self.device.launches >= launches

    def assert_nothing_is_left(self) -> None:
        self.passes = lambda: False
        assert self.engine.submit([4, 5], SamplingParams(max_new_tokens=5)).result(
            20
        ).token_ids == tuple(expected_tokens([4, 5], 5, VOCAB))
        self.engine.close()
        stats = self.engine.stats()
        assert (stats.live, stats.waiting, stats.rows_held, stats.pages_held) == (0, 0, 0, 0)


@contextmanager
def served(depth: int = 2, max_rows: int = 4, **options: Any) -> Iterator[Served]:
    made = Served(depth, max_rows, **options)
    with made.engine:
        yield made


def ends(request: Request) -> list[str]:
    """Finish reasons of its final events."""
    return [event.finish_reason for event in request.iter() if event.finish_reason is not None]


@DEPTHS
@KIND
def test_hazard_13_a_timeout_keeps_the_tokens_so_far_and_touches_no_other_request(
    depth: int, kind: str
) -> None:
    with served(depth) as made:
        made.after(6)
        params = SamplingParams(max_new_tokens=LONG, **KINDS[kind]())
        others = [made.engine.submit([n], SamplingParams(max_new_tokens=30)) for n in (1, 2)]
        late = made.engine.submit([7, 8], params, deadline=SOON)
        output = late.result(20)
        assert (output.finish_reason, output.stop_reason, output.error) == ("timeout", None, None)
        assert ends(late) == ["timeout"]
        whole = expected_tokens([7, 8], LONG, VOCAB)
        if kind != "constrained":
            assert list(output.token_ids) == whole[: len(output.token_ids)]
        assert len(output.token_ids) < 8
        assert output.text == made.engine.tokenizer.decode(output.token_ids)
        for n, other in zip((1, 2), others, strict=True):
            assert list(other.result(20).token_ids) == expected_tokens([n], 30, VOCAB)
        assert made.engine.stats().timeouts == 1
        made.assert_nothing_is_left()


@DEPTHS
@KIND
@pytest.mark.parametrize("launches", range(1, 10))
def test_hazard_10_a_deadline_may_pass_at_any_launch_and_the_request_ends_once(
    depth: int, kind: str, launches: int
) -> None:
    """Also in the turn in which the request ends by itself, of its cap of 4 tokens."""
    with served(depth) as made:
        made.after(launches)
        request = made.engine.submit(
            [9] * 20, SamplingParams(max_new_tokens=4, **KINDS[kind]()), deadline=SOON
        )
        output = request.result(20)
        assert ends(request) == [output.finish_reason]
        # three chunks give the first token and three steps the others; the last step is in flight
        # at the begin of a turn at depth 2 alone
        assert output.finish_reason == ("timeout" if launches <= 4 + depth else "length")
        assert (output.finish_reason == "length") == (len(output.token_ids) == 4)
        assert made.engine.stats().timeouts == (output.finish_reason == "timeout")
        made.assert_nothing_is_left()


@DEPTHS
def test_hazard_11_a_deadline_reaches_a_request_wherever_it_is(depth: int) -> None:
    """One decodes, one has half of its prompt in, two wait; the last has no deadline."""
    with served(depth, max_rows=2) as made:
        made.after(4)
        decoding, prefilling, waiting, later, without = (
            made.engine.submit(prompt, SamplingParams(max_new_tokens=LONG - len(prompt)), **more)
            for prompt, more in (
                ([1], {"deadline": SOON}),
                ([2] * 59, {"deadline": SOON}),
                ([3], {"deadline": SOON}),
                ([4], {"timeout_s": 1000.0, "deadline": SOON}),
                ([5], {}),
            )
        )
        for request in (decoding, prefilling, waiting, later):
            assert request.result(20).finish_reason == "timeout"
            assert ends(request) == ["timeout"]
        assert decoding.result().token_ids
        for request in (prefilling, waiting, later):
            assert (request.result().token_ids, request.result().ttft_ms) == ((), None)
        assert list(without.result(20).token_ids) == expected_tokens([5], LONG - 1, VOCAB)
        assert made.engine.stats().timeouts == 4
        made.assert_nothing_is_left()


@DEPTHS
@pytest.mark.parametrize("ended", [False, True], ids=["a token", "the end"])
def test_a_deadline_that_passes_while_an_event_is_delivered(depth: int, ended: bool) -> None:
    """The listener, which the engine calls with the event, sees it pass."""
    over: list[bool] = []

    def listen(output: StepOutput) -> None:
        if output.ends if ended else output.tokens:
            over.append(True)

    with served(depth) as made:
        made.passes = lambda: bool(over)
        made.engine.listen(listen)
        request = made.engine.submit([3], SamplingParams(max_new_tokens=12), deadline=SOON)
        output = request.result(20)
        assert ends(request) == [output.finish_reason]
        assert output.finish_reason == ("length" if ended else "timeout")
        tokens = expected_tokens([3], 12, VOCAB)
        # of the step after it, which is in flight at depth 1, there may be one more
        assert len(output.token_ids) in ((12,) if ended else (1, 2))
        assert list(output.token_ids) == tokens[: len(output.token_ids)]
        made.assert_nothing_is_left()


@DEPTHS
@pytest.mark.parametrize("more", [{"timeout_s": 0}, {"deadline": 0.0}, {"timeout_s": 1e-9}])
def test_a_deadline_that_has_passed_at_submit_ends_the_request_before_its_first_step(
    depth: int, more: dict[str, Any]
) -> None:
    device = WatchedDevice(depth=depth)
    with engine_on(device) as engine:
        request = engine.submit([1, 2], SamplingParams(max_new_tokens=9), **more)
        output = request.result(20)
        assert (output.finish_reason, output.token_ids, ends(request)) == (
            "timeout",
            (),
            ["timeout"],
        )
        assert device.launches == 0
        (alive,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=5))
        assert list(alive.token_ids) == expected_tokens([1, 2], 5, VOCAB)


@DEPTHS
def test_a_timeout_is_in_seconds_from_the_call(depth: int) -> None:
    device = WatchedDevice(depth=depth)
    device.on_step = lambda: time.sleep(0.02)
    with engine_on(device, tokenizer=byte_tokenizer(TEMPLATE)) as engine:
        begin, params = time.perf_counter(), SamplingParams(max_new_tokens=LONG)
        outputs = engine.generate([[1], [2]], params, timeout_s=0.2)
        messages = [{"role": "user", "content": "x"}]
        outputs.append(engine.chat(messages, params, timeout_s=0.2))
        prompts = [[1], [2], engine.tokenizer.encode_chat(messages)]
        assert time.perf_counter() - begin >= 0.4
    assert [output.finish_reason for output in outputs] == ["timeout"] * 3
    for prompt, output in zip(prompts, outputs, strict=True):
        count = len(output.token_ids)
        assert list(output.token_ids) == expected_tokens(prompt, count, VOCAB)


def test_the_sooner_of_the_two_counts() -> None:
    with engine_on(WatchedDevice()) as engine:
        params = SamplingParams(max_new_tokens=3)
        for more, reason in (
            ({"timeout_s": 0, "deadline": SOON}, "timeout"),
            ({"timeout_s": 1000, "deadline": 0}, "timeout"),
            ({"timeout_s": math.inf, "deadline": 10**400}, "length"),
        ):
            assert engine.submit([1], params, **more).result(20).finish_reason == reason


def test_a_request_that_ended_in_time_does_not_time_out_later() -> None:
    with served() as made:
        made.passes = lambda: True
        first = made.engine.submit([1], SamplingParams(max_new_tokens=3), deadline=None)
        assert first.result(20).finish_reason == "length"
        made.passes = lambda: False
        second = made.engine.submit([1], SamplingParams(max_new_tokens=3), deadline=SOON)
        assert second.result(20).finish_reason == "length"
        made.passes = lambda: True
        third = made.engine.submit([2], SamplingParams(max_new_tokens=3))
        assert third.result(20).finish_reason == "length"
        assert (ends(second), made.engine.stats().timeouts) == (["length"], 0)


BAD = [math.nan, -1, -0.5, True, False, "5", [1.0], 1j, -math.inf]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("name", ["timeout_s", "deadline"])
def test_what_is_no_time_is_refused_by_name_and_nothing_is_queued(name: str, value: object) -> None:
    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer(TEMPLATE)) as engine:
        calls: list[Callable[..., object]] = [
            lambda **more: engine.submit([1], **more),
            lambda **more: engine.generate([[1], [2]], **more),
            lambda **more: engine.chat([{"role": "user", "content": "x"}], **more),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=rf"^{name} is .*; give seconds >= 0.*, or None"):
                call(**{name: value})
        assert engine.stats().live == engine.stats().steps == 0


@pytest.mark.parametrize("value", [math.nan, 1.5, True, "high", None, 2**31, -(10**400)], ids=str)
def test_what_is_no_priority_is_refused_by_name(value: object) -> None:
    with (
        engine_on(WatchedDevice()) as engine,
        pytest.raises(ConfigError, match=r"^priority is .*; give an integer from -2147483647 to"),
    ):
        engine.submit([1], priority=value)  # type: ignore[arg-type]
