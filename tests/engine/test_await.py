"""Requests in async code: awaited, streamed, cancelled with their task or left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from photon_ext.engine import Engine, Request
from photon_ext.errors import EngineDeadError
from photon_ext.sampling import SamplingParams
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

SHORT, LONG = SamplingParams(8), SamplingParams(50)


class Held:
    """An engine whose third step waits until `go_on` is set."""

    def __init__(self, depth: int) -> None:
        self.device, self.go_on = WatchedDevice(depth=depth), threading.Event()
        self.device.on_step = self._hold
        self.engine: Engine = engine_on(self.device, tokenizer=byte_tokenizer())

    def _hold(self) -> None:
        if self.device.launches >= 3:
            self.go_on.wait(20)


@pytest.fixture(params=[1, 2])
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    made = Held(request.param)
    with made.engine:
        yield made
        made.go_on.set()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))  # type: ignore[arg-type]


def test_await_gives_the_output_as_often_as_it_is_asked(held: Held) -> None:
    held.go_on.set()

    async def main() -> None:
        request = held.engine.submit([1, 2], SHORT)
        first = await request
        assert await request is first
        assert await request.wait() is first
        assert list(first.token_ids) == expected_tokens([1, 2], 8, VOCAB)

    run(main)


def test_many_requests_are_awaited_together(held: Held) -> None:
    held.go_on.set()

    async def main() -> None:
        requests = [held.engine.submit([n], SHORT) for n in range(7)]
        outputs = await asyncio.gather(*requests)
        assert [list(output.token_ids) for output in outputs] == [
            expected_tokens([n], 8, VOCAB) for n in range(7)
        ]

    run(main)


async def awaited(request: Request, detach: bool) -> None:
    await request.wait(detach)


async def streamed(request: Request, detach: bool) -> None:
    async for _ in request.stream(detach):
        pass


async def sent_on(request: Request, detach: bool) -> None:
    """As a server does, which waits for its client between two events."""
    async for _ in request.stream(detach):
        await asyncio.sleep(20)


@pytest.mark.parametrize("read", [awaited, streamed, sent_on])
@pytest.mark.parametrize("detach", [False, True])
def test_a_cancelled_task_cancels_its_request_unless_detached(
    held: Held, read: Callable[[Request, bool], Awaitable[None]], detach: bool
) -> None:
    request = held.engine.submit([1, 2], LONG)

    async def main() -> None:
        task = asyncio.ensure_future(read(request, detach))
        await asyncio.sleep(0.05)  # it waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)  # which closes, at the latest at its end, a generator that was left
    held.go_on.set()
    output = request.result(20)
    expected = expected_tokens([1, 2], 50, VOCAB)
    assert list(output.token_ids) == expected[: len(output.token_ids)]
    assert output.finish_reason == ("length" if detach else "cancelled")


def test_a_time_out_is_a_cancelled_task(held: Held) -> None:
    request = held.engine.submit([1, 2], LONG)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request.wait(), 0.05)
        held.go_on.set()

    run(main)
    assert request.result(20).finish_reason == "cancelled"


def test_to_leave_a_stream_early_does_not_cancel(held: Held) -> None:
    request = held.engine.submit([1, 2], LONG)

    async def main() -> None:
        async for _ in request.stream():
            break
        await asyncio.sleep(0)
        held.go_on.set()
        assert (await request).finish_reason == "length"

    run(main)


def test_a_request_that_ended_is_awaited_in_a_loop_of_its_own(held: Held) -> None:
    held.go_on.set()
    request = held.engine.submit([1, 2], SHORT)
    request.result(20)

    async def main() -> None:
        assert len((await request).token_ids) == 8

    run(main)
    run(main)


def test_a_crash_ends_who_awaits() -> None:
    device, ready = WatchedDevice(), threading.Event()

    def crash() -> None:
        ready.wait(20)
        if device.launches == 3:
            raise OSError("the device fell off the bus")

    device.on_step = crash
    engine = engine_on(device)

    async def main() -> None:
        requests = [engine.submit([n], LONG) for n in range(3)]
        tasks = [asyncio.ensure_future(request.wait()) for request in requests]
        await asyncio.sleep(0.02)
        ready.set()
        outputs = await asyncio.gather(*tasks)
        assert {output.finish_reason for output in outputs} == {"error"}
        assert all("fell off the bus" in (output.error or "") for output in outputs)
        with pytest.raises(EngineDeadError):
            engine.submit([1])

    run(main)
    engine.close()
