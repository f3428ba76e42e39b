"""`engine.listen`: each token of each request exactly once, in order, and every end."""

from __future__ import annotations

import logging
import pickle
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_ext.engine import Engine, Request, StepOutput
from photon_ext.errors import ConfigError
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Listener:
    """Writes down what it hears, as another process would that gets each output as bytes."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.batches: list[bytes] = []

    def __call__(self, output: StepOutput) -> None:
        self.batches.append(output.ids)
        ids, counts, tokens, logprobs, ends = pickle.loads(pickle.dumps(tuple(output)))
        assert (len(ids), len(tokens)) == (8 * len(counts), 4 * sum(counts))
        begin, tokens = 0, array("i", tokens)
        for request, count in zip(array("q", ids), counts, strict=True):
            assert not (count and request in self.ended), "nothing comes after the end"
            self.tokens.setdefault(request, []).extend(tokens[begin : begin + count])
            assert len(logprobs.get(request, tokens[:count])) == count
            begin += count
        self.ended += [end.id for end in ends]

    def check(self, requests: list[Request]) -> None:
        """All tokens of the requests once, in order, and each end once."""
        assert len(self.ended) == len(set(self.ended))
        assert set(self.ended) == {request.id for request in requests}
        for request in requests:
            assert tuple(self.tokens.get(request.id, ())) == request.result(0).token_ids


def engine_of(device: WatchedDevice, listener: Callable[[StepOutput], None]) -> Engine:
    engine = engine_on(device, tokenizer=byte_tokenizer())
    engine.listen(listener)
    return engine


REQUEST = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["plain", "constraint", "stop strings", "stop ids"]),
    st.none() | st.integers(1, 12),  # cancel at this launch
)


def params_of(kind: str, count: int) -> SamplingParams:
    if kind == "constraint":
        return SamplingParams(count, constraint=from_allowed_ids(range(60, 90)))
    if kind == "stop strings":
        return SamplingParams(count, stop=("a", "e", "\ufffd\ufffd"))
    return SamplingParams(count, stop_token_ids=range(1, 99, 33) if kind == "stop ids" else ())


@settings(max_examples=40)
@given(st.lists(REQUEST, min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_a_listener_hears_every_token_once_whatever_runs_beside_it(
    requests: list[tuple[list[int], int, str, int | None]], depth: int
) -> None:
    device, listener, ready = WatchedDevice(depth=depth, max_rows=3), Listener(), threading.Event()
    handles: list[Request] = []

    def cancel_on_time() -> None:
        ready.wait(20)
        for handle, request in zip(handles, requests, strict=True):
            if request[3] == device.launches:
                handle.cancel()

    device.on_step = cancel_on_time
    with engine_of(device, listener) as engine:
        handles += [engine.submit(p, params_of(kind, n)) for p, n, kind, _ in requests]
        ready.set()
        for handle in handles:
            handle.result(20)
    listener.check(handles)


@DEPTHS
def test_while_nobody_joins_or_leaves_the_ids_are_the_same_object(depth: int) -> None:
    """So that whoever listens looks at them once, and they cost nothing."""
    listener = Listener()
    with engine_of(WatchedDevice(depth=depth), listener) as engine:
        engine.generate([[1], [2]], SamplingParams(max_new_tokens=20))
    first, *together = [batch for batch in listener.batches if len(batch) == 2 * 8]
    assert first == together[0], "of prompts, beside rows of which there are none yet"
    assert len(together) > 10
    assert len({id(batch) for batch in together}) == 1


@DEPTHS
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_listener_that_raises_is_dropped_and_hurts_nobody(
    depth: int, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[StepOutput] = []

    def fragile(output: StepOutput) -> None:
        calls.append(output)
        raise kind("no more")

    listener = Listener()
    with caplog.at_level(logging.ERROR), engine_of(WatchedDevice(depth=depth), fragile) as engine:
        engine.listen(listener)
        requests = [engine.submit([n], SamplingParams(max_new_tokens=6)) for n in range(3)]
        outputs = [request.result(20) for request in requests]
    assert [list(output.token_ids) for output in outputs] == [
        expected_tokens([n], 6, VOCAB) for n in range(3)
    ]
    listener.check(requests)
    assert len(calls) == 1
    assert f"raised {kind.__name__}: no more; it hears no more" in caplog.text


@DEPTHS
def test_a_crash_is_told_with_all_that_it_ended(depth: int) -> None:
    device, listener = WatchedDevice(depth=depth, max_rows=2), Listener()
    ready = threading.Event()

    def crash() -> None:
        ready.wait(20)
        if device.launches == 4:
            raise OSError("the device fell off the bus")

    device.on_step = crash
    engine = engine_of(device, listener)
    requests = [engine.submit([n], SamplingParams(max_new_tokens=20)) for n in range(5)]
    ready.set()
    assert {request.result(20).finish_reason for request in requests} == {"error"}
    engine.close()
    assert sorted(listener.ended) == [request.id for request in requests]


def test_closing_is_told_too() -> None:
    device, listener, launched = WatchedDevice(max_rows=1), Listener(), threading.Event()
    device.on_step = launched.set
    engine = engine_of(device, listener)
    requests = [engine.submit([n], SamplingParams(max_new_tokens=50)) for n in range(3)]
    assert launched.wait(20)
    engine.close()
    listener.check(requests)


def test_what_cannot_be_called_is_refused() -> None:
    with (
        engine_on(WatchedDevice()) as engine,
        pytest.raises(ConfigError, match="listener is 5; give a function"),
    ):
        engine.listen(5)  # type: ignore[arg-type]


@dataclass
class Equal:
    """Equal to others of its kind, or, with an array, comparable with none."""

    heard: Any
    raises: bool = field(compare=False)

    def __call__(self, output: StepOutput) -> None:
        if self.raises:
            raise ValueError("a listener's fault")
        self.ends = len(output.ends)

    def __repr__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize("heard", [0, np.zeros(3)])
def test_of_listeners_that_are_equal_the_one_that_raises_hears_no_more(heard: Any) -> None:
    healthy, faulty = Equal(heard, False), Equal(heard, True)
    device = WatchedDevice(depth=2, max_rows=3)
    with engine_of(device, healthy) as engine:
        engine.listen(faulty)
        for _ in range(2):
            assert engine.submit([1, 2], SamplingParams(2)).result(20).error is None
        (left,) = engine._loop.listeners
        assert left is healthy
    assert healthy.ends == 1
