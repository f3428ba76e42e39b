"""EngineClient, and the engine's side of its channel, in one process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from photon_ext.engine import Engine, StepOutput
from photon_ext.sampling import SamplingParams
from photon_ext.serve import (
    Ask,
    BadAsk,
    Busy,
    Delta,
    EngineClient,
    EngineGone,
    EngineStarting,
    Generation,
)
from photon_ext.serve.generation import Inbox
from photon_ext.serve.home import LocalHome
from photon_ext.serve.messages import DOWN, BlockingFrames, Cancel, Refused, Submit, Tokens, frame
from photon_ext.serve.token_router import TokenRouter
from tests.serve.processes import until

ROWS, WAITING = 4, 60
LONG: dict[str, Any] = {"max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def home(model: str) -> Iterator[LocalHome]:
    made = LocalHome(model, {"device": "cpu", "max_rows": ROWS, "max_waiting": WAITING})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(home: LocalHome) -> Iterator[None]:
    """After each test nothing runs or waits, and all pages are free."""
    yield
    until(lambda: is_empty(home.engine))


def is_empty(engine: Engine) -> bool:
    stats = engine.stats()
    held = stats.live, stats.waiting, stats.rows_held, stats.pages_held, stats.automata_held
    return not any(held)


def run(home: LocalHome, test: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def connected() -> None:
        client = EngineClient(home.client_socket())
        await client.ready()
        await test(client)
        await client.close()

    asyncio.run(connected())


async def comes(true: Callable[[], object]) -> None:
    """As `until`, while the event loop goes on: a client that answers no beat is cut off."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


class Brake:
    """Holds the engine at the first step at which something is true: what runs does not end
    meanwhile, however late the test's own thread is.
    """

    def __init__(self, engine: Engine, when: Callable[[], object] = lambda: True) -> None:
        self._engine, self._when = engine, when
        self._holds, self._goes_on = threading.Event(), threading.Event()

    async def __aenter__(self) -> Brake:
        self._engine.listen(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.release()
        self._engine._loop.listeners.remove(self)

    def __call__(self, output: StepOutput) -> None:
        if self._when():
            self._holds.set()
            self._goes_on.wait(60)

    async def holds(self) -> None:
        await comes(self._holds.is_set)

    def release(self) -> None:
        self._goes_on.set()


async def tokens(generation: Generation, n: int = 1) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(n)]
    async for deltas in generation:
        for delta in deltas:
            found[delta.index] += delta.tokens
    return found


def test_answers_are_those_of_the_engine(home: LocalHome) -> None:
    params: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.9, "seed": 7, "logprobs": 3}
    outputs = home.engine.generate([[1, 2, 3]], SamplingParams(**params, prompt_logprobs=2), n=2)

    async def test(client: EngineClient) -> None:
        generation = await client.generate(Ask((1, 2, 3), {**params, "prompt_logprobs": 2}, n=2))
        found: list[list[Delta]] = [[], []]
        async for deltas in generation:
            for delta in deltas:
                found[delta.index].append(delta)
        for output, deltas in zip(outputs, found, strict=True):
            assert [token for one in deltas for token in one.tokens] == list(output.token_ids)
            scores = [one for delta in deltas if delta.scores is not None for one in delta.scores]
            assert len(scores) == len(output.logprobs)
            for mine, theirs in zip(scores, output.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.sampled, rel=1e-6)
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert deltas[-1].end is not None
            assert deltas[-1].end[:2] == (output.finish_reason, output.stop_reason)
            assert all(delta.end is None for delta in deltas[:-1])
            cached = [delta.cached_tokens for delta in deltas if delta.tokens]
            assert cached == [0] + [None] * (len(cached) - 1)
        prompts = [one for delta in found[0] if delta.prompt_scores for one in delta.prompt_scores]
        assert len(prompts) == len(outputs[0].prompt_logprobs) == 2
        assert [len(one.top) for one in prompts] == [2, 2]
        assert all(delta.prompt_scores is None for delta in found[1])

    run(home, test)


def test_scores_of_a_long_prompt_come_in_pieces_before_the_end(
    home: LocalHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon_ext.serve.hub.PIECE_BYTES", 1000)

    async def test(client: EngineClient) -> None:
        ask = Ask(tuple(range(200)) * 5, {"max_new_tokens": 1, "prompt_logprobs": 20})
        deltas = [one async for told in await client.generate(ask) for one in told]
        scores = [one for delta in deltas if delta.prompt_scores for one in delta.prompt_scores]
        assert len(scores) == 999
        assert deltas[-1].end is not None
        assert all(delta.end is None for delta in deltas[:-1])

    run(home, test)


def test_tokens_that_wait_come_together(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        generation = await client.generate(Ask((5,), {"max_new_tokens": 50, "ignore_eos": True}))
        await comes(lambda: not client._answers)  # its end has come
        told = [deltas async for deltas in generation]
        assert len(told) == 1
        assert len(told[0][0].tokens) == 50

    run(home, test)


@pytest.mark.parametrize(
    ("asked", "param", "word"),
    [
        ({"params": {"temperature": -1}}, "temperature", "0.001"),
        ({"params": {"seed": 2**64}}, "seed", "2**64"),
        ({"params": {"seed": 2**80}}, "seed", "2**64"),
        ({"params": {"logit_bias": {1: 1e9}}}, "logit_bias", "-100"),
        ({"params": {"stop": "x"}}, "stop", "client"),
        ({"params": {"constraint": 1}}, "constraint", "client"),
        ({"params": {"top_k": object()}}, "top_k", "sent"),
        ({"params": {"nonsense": 1}}, None, "nonsense"),
        ({"params": {"regex": "("}}, "regex", "unclosed"),
        ({"params": {"regex": "a", "choice": ["a"]}}, "regex", "one of them"),
        ({"ids": (257,)}, "ids", "257"),
        ({"ids": (-1,)}, "ids", "-1"),
        ({"ids": (2**40,)}, "ids", "token id"),
        ({"ids": ()}, "ids", "prompt"),
        ({"ids": (1,) * 5000}, "ids", "4096"),
        ({"n": 0}, "n", "1"),
        ({"adapter": "none"}, "adapter", "none"),
        ({"timeout_s": -1.0}, "timeout_s", ">= 0"),
        ({"priority": 2**40}, "priority", "integer"),
    ],
)
def test_a_wrong_ask_is_refused_by_name(
    home: LocalHome, asked: dict[str, Any], param: str | None, word: str
) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(BadAsk) as caught:
            await client.generate(Ask(**{"ids": (1,), **asked}))
        assert caught.value.param == param
        assert word in str(caught.value)

    run(home, test)


def test_a_fault_of_the_engine_ends_the_request_at_which_it_came(
    home: LocalHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread for all clients, and with it the engine's process; then it was told as a
    wrong request.
    """

    def fault(*asked: object, **options: object) -> None:
        raise MemoryError("planted")

    async def test(client: EngineClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(home.engine, "submit", fault)
            with pytest.raises(EngineGone, match="planted"):
                await client.generate(Ask((1,)))
        async with await client.generate(Ask((1,), {"max_new_tokens": 1})) as generation:
            assert [one async for deltas in generation for one in deltas][-1].end is not None

    run(home, test)


def test_an_engine_whose_start_is_not_waited_for_is_ended() -> None:
    class Home:
        def __init__(self) -> None:
            self.ours, self.engines = socket.socketpair()
            self.closed = False

        def client_socket(self) -> socket.socket:
            return self.ours

        def why(self) -> str:
            return ""

        def close(self) -> None:
            self.closed = True
            self.engines.close()

    home = Home()

    async def test() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(EngineClient(home.client_socket(), home).__aenter__(), 0.05)

    asyncio.run(test())
    assert home.closed


def test_a_client_that_lost_its_engine_asks_why_beside_the_event_loop() -> None:
    asked = threading.Event()

    class Home:
        def client_socket(self) -> socket.socket:
            raise NotImplementedError

        def why(self) -> str:
            assert asked.wait(60), "the event loop waits"
            return "planted"

        def close(self) -> None: ...

    ours, engines = socket.socketpair()

    async def test() -> None:
        client = EngineClient(ours, Home())
        await client.connect()
        engines.close()
        await asyncio.sleep(0.05)
        assert client.health().state == "starting"
        asked.set()
        with pytest.raises(EngineGone, match="planted"):
            await client.ready()
        await client.close()

    asyncio.run(test())


def test_one_of_n_answers_can_be_cancelled(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        generation = await client.generate(Ask((1,), {**LONG, "temperature": 1.0}, n=3))
        generation.cancel(1)
        async for deltas in generation:
            assert all(delta.index != 1 for delta in deltas)
            break
        generation.cancel()
        assert [deltas async for deltas in generation] == []

    run(home, test)


def test_leaving_and_losing_a_generation_cancels_it(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        async with await client.generate(Ask((1,), LONG)):
            pass
        lost = await client.generate(Ask((1,), LONG))
        async for _ in lost:
            break
        del lost
        gc.collect()
        await comes(lambda: not client._answers and is_empty(home.engine))

    run(home, test)


def test_a_timeout_ends_an_answer_with_what_it_has(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        ask = Ask((1,), {"max_new_tokens": 4000, "ignore_eos": True}, timeout_s=0.2)
        told = [one async for deltas in await client.generate(ask) for one in deltas]
        assert told[-1].end is not None
        assert told[-1].end.finish_reason == "timeout"

    run(home, test)


@pytest.mark.parametrize("start", [EngineClient.in_process, EngineClient.start])
def test_a_closed_client_leaves_no_descriptor_open(
    model: str, start: Callable[..., EngineClient]
) -> None:
    async def one() -> None:
        async with start(model, device="cpu", max_rows=2) as client:
            await tokens(await client.generate(Ask((1,), {"max_new_tokens": 2})))

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    asyncio.run(one())  # what the process opens once
    before = descriptors()
    asyncio.run(one())
    assert descriptors() == before


def test_a_closed_client_says_so(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        generation = await client.generate(Ask((1,), LONG))
        await client.close()
        with pytest.raises(EngineGone, match="closed"):
            await tokens(generation)
        with pytest.raises(EngineGone, match="closed"):
            await client.generate(Ask((1,)))
        assert client.health().state == "gone"

    run(home, test)


def test_before_the_engine_is_ready_asks_are_refused() -> None:
    async def asked() -> None:
        ours, _engines = socket.socketpair()
        client = EngineClient(ours)
        assert client.health().state == "starting"
        with pytest.raises(EngineStarting):
            await client.generate(Ask((1,)))
        await client.close()

    asyncio.run(asked())


def test_statistics_are_the_meters(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        before = (await client.stats())["tokens"]
        await tokens(await client.generate(Ask((1,), {"max_new_tokens": 9, "ignore_eos": True})))
        assert (await client.stats())["tokens"] == before + 9

    run(home, test)


def test_an_adapter_that_is_none_is_refused(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(BadAsk, match="lora_slots"):
            await client.load_adapter("a", "/nowhere")
        with pytest.raises(BadAsk, match="no adapter"):
            await client.unload_adapter("a")

    run(home, test)


def test_hazard_b6_numbers_of_two_clients_are_apart(home: LocalHome) -> None:
    """Both use the same numbers, and again after one has cancelled."""

    async def test(client: EngineClient) -> None:
        other = EngineClient(home.client_socket())
        await other.ready()
        params: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0}
        for round_ in range(3):
            mine = await client.generate(Ask((1,), {**params, "seed": round_}))
            theirs = await other.generate(Ask((2,), {**params, "seed": round_}))
            left = await other.generate(Ask((3,), LONG))
            left.cancel()
            (got,), (others_got,) = await asyncio.gather(tokens(mine), tokens(theirs))
            seeded = SamplingParams(**params, seed=round_)
            expected = await asyncio.to_thread(home.engine.generate, [[1], [2]], seeded)
            assert [got, others_got] == [list(one.token_ids) for one in expected]
        await other.close()

    run(home, test)


def test_hazard_b7_a_task_may_be_cancelled_at_every_await(home: LocalHome) -> None:
    """While it runs at once and while it waits for a row, with the form of its answer compiled and
    without one.
    """

    async def one(client: EngineClient, params: dict[str, Any]) -> None:
        async with await client.generate(Ask((1, 2), params, n=2)) as generation:
            async for _ in generation:
                pass

    async def test(client: EngineClient) -> None:
        for params in (LONG, {**LONG, "regex": "[ab]{2000}"}):
            for awaits in range(12):
                task = asyncio.create_task(one(client, params))
                for _ in range(awaits):
                    await asyncio.sleep(0.001 * (awaits % 3))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        await asyncio.sleep(0.3)
        assert not client._answers
        assert not client._inboxes

    run(home, test)


def test_hazard_b8_who_leaves_the_queue_is_never_prefilled(home: LocalHome) -> None:
    """All rows are taken; those who wait leave; afterwards their prompts were not fed."""

    async def test(client: EngineClient) -> None:
        async with Brake(home.engine) as brake:
            running = [await client.generate(Ask((1,), LONG)) for _ in range(ROWS)]
            await brake.holds()
            before = (await client.stats())["prompt_tokens"]
            storm = [await client.generate(Ask((9,) * 500, LONG)) for _ in range(WAITING)]
            for generation in storm:
                generation.cancel()
        await comes(lambda: home.engine.waiting == 0)
        for generation in running:
            generation.cancel()
        await comes(lambda: is_empty(home.engine))
        assert (await client.stats())["prompt_tokens"] - before <= ROWS  # those of `running`
        for generation in (*storm, *running):
            assert [one async for one in generation] == []

    run(home, test)


def test_hazard_b9_who_stops_reading_is_cut_off_and_others_lose_nothing(home: LocalHome) -> None:
    """One client asks for much and reads nothing; another has 1,000 requests meanwhile."""
    stalled = home.client_socket()
    for number in range(0, ROWS * 4, 2):
        stalled.sendall(frame(submit(number, [1], LONG, n=2)))

    async def test(client: EngineClient) -> None:
        async def one(number: int) -> list[int]:
            params = {"max_new_tokens": 4, "ignore_eos": True}
            while True:
                try:
                    return (await tokens(await client.generate(Ask((number % 256,), params))))[0]
                except Busy:
                    await asyncio.sleep(0.05)

        found = await asyncio.gather(*map(one, range(1000)))
        assert all(len(answer) == 4 for answer in found)
        for number in range(256):
            assert found[number] == found[number + 256]

    began = time.monotonic()
    run(home, test)
    until(lambda: is_empty(home.engine))
    assert time.monotonic() - began < 60
    received = 0
    while data := stalled.recv(2**16):
        received += len(data)
    assert received < 2**22  # what the system keeps, and no more
    stalled.close()


def test_hazard_b9_what_waits_for_a_client_is_bounded(home: LocalHome) -> None:
    """One that reads slowly is cut off at 8 MiB, though it does answer."""
    from photon_ext.serve.engine_link import MOST_UNREAD_BYTES, EngineLink

    ours, theirs = socket.socketpair()
    link = EngineLink(ours, lambda: None)
    message = Tokens(bytes(2**16))
    for _ in range(MOST_UNREAD_BYTES // 2**16 + 8):
        link.send(message)
    assert link.cut is not None
    assert "unread" in link.cut
    assert not link.waits
    theirs.close()


def test_hazard_b10_a_full_queue_answers_everybody(home: LocalHome) -> None:
    """Ten times as many as there is room for, from two clients."""
    asked = 5 * (ROWS + WAITING)

    async def test(client: EngineClient) -> None:
        other = EngineClient(home.client_socket())
        await other.ready()
        full: list[Generation] = []

        async def one(asks: EngineClient) -> int:
            try:
                generation = await asks.generate(Ask((1,), LONG))
            except Busy as error:
                return 0 if error.retry_after_s >= 1 else -1
            full.append(generation)
            return 1

        who = (client, other) * asked
        async with Brake(home.engine):
            assert {await one(client) for _ in range(ROWS + WAITING - 10)} == {1}
            taken = await asyncio.wait_for(asyncio.gather(*map(one, who)), 60)
            assert sum(taken) == 10
            for generation in full:
                generation.cancel()
        await comes(lambda: is_empty(home.engine))
        assert [len(one) for one in await tokens(await client.generate(Ask((1,), {})))] != [0]
        await other.close()

    run(home, test)


def test_a_full_queue_says_when_those_that_wait_have_their_rows(home: LocalHome) -> None:
    async def test(client: EngineClient) -> None:
        async with (
            Brake(home.engine) as first,
            Brake(home.engine, lambda: home.engine.waiting == WAITING) as brake,
        ):
            full = [await client.generate(Ask((1,), LONG)) for _ in range(ROWS + WAITING)]
            first.release()
            await brake.holds()
            requests = home.engine.meter.requests
            for row_s, expected in ((0.0, 1), (1e-3, 1), (0.5, 8), (3.0, 45), (1e6, 60)):
                requests.recent_row_s = row_s
                with pytest.raises(Busy) as caught:
                    await client.generate(Ask((1,), LONG))
                assert caught.value.retry_after_s == expected
            requests.recent_row_s = 0.0
            for generation in full:
                generation.cancel()

    run(home, test)


def test_hazard_b11_cached_pages_are_those_of_the_same_salt(home: LocalHome) -> None:
    prompt = tuple(range(100, 200))

    async def test(client: EngineClient) -> None:
        async def cached(salt: str | None) -> int | None:
            ask = Ask(prompt, {"max_new_tokens": 1}, cache_salt=salt)
            deltas = [one async for told in await client.generate(ask) for one in told]
            return deltas[0].cached_tokens

        assert await cached("mine") == 0
        assert await cached("other") == 0
        assert await cached(None) == 0
        assert await cached("mine") == 96

    run(home, test)


def test_a_client_may_leave_while_much_waits_for_it() -> None:
    """The system says so in the middle of what is sent on."""
    from photon_ext.serve.engine_link import EngineLink

    ours, theirs = socket.socketpair()
    link = EngineLink(ours, lambda: None)
    for _ in range(8):
        link.send(Tokens(bytes(2**17)))
    assert link.waits
    theirs.close()
    link.flush()
    assert link.cut is not None
    assert not link.waits
    link.send(Tokens(b""))
    link.flush()


@pytest.mark.parametrize("sent", [b"\xff" * 64, frame(Refused(1, "bad", "")), b"\0\0\0\0"])
def test_a_client_that_sends_nonsense_is_cut_off_alone(home: LocalHome, sent: bytes) -> None:
    sock = home.client_socket()
    sock.sendall(frame(submit(1, [1], LONG)))
    sock.sendall(sent)
    told = []
    with pytest.raises(EOFError):
        told.extend(iter(partial(BlockingFrames(sock, DOWN).receive, 60), None))
    sock.close()


def test_what_is_cancelled_before_it_is_asked_for_is_no_fault(home: LocalHome) -> None:
    sock = home.client_socket()
    sock.sendall(frame(Cancel([1, 2, 3])) + frame(submit(1, [1], {"max_new_tokens": 2})))
    frames = BlockingFrames(sock, DOWN)
    while not (isinstance(told := frames.receive(60), Tokens) and told.ends):
        pass
    assert told.ends[0].id == 1
    sock.close()


def submit(number: int, ids: list[int], params: dict[str, Any], n: int = 1) -> Submit:
    return Submit(number, array("i", ids).tobytes(), params, n, 0, None, None, None)


def save_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of the model of tiny.py, large enough to change tokens."""
    noise = torch.Generator().manual_seed(seed)
    base = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{base}.lora_A.weight": torch.randn(4, 48, generator=noise),
        f"{base}.lora_B.weight": torch.randn(32, 4, generator=noise),
    }
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_come_and_go_for_all_clients(model: str, tmp_path: Path) -> None:
    """And requests that name one have its tokens."""
    path = str(save_adapter(tmp_path / "a", 1))
    params = {"max_new_tokens": 12, "ignore_eos": True}
    home = LocalHome(model, {"device": "cpu", "max_rows": 2, "lora_slots": 1}, {"first": path})

    async def test(client: EngineClient) -> None:
        other = EngineClient(home.client_socket())
        assert (await other.ready()).adapters == ("first",)
        await client.load_adapter("second", str(save_adapter(tmp_path / "b", 2)))
        assert client.model.adapters == ("first", "second")
        asks = [Ask((1, 2, 3), params, adapter=name) for name in (None, "first", "second")]
        found = [(await tokens(await other.generate(ask)))[0] for ask in asks]
        assert len(set(map(tuple, found))) == 3
        assert other.model.adapters == ("first", "second")
        with pytest.raises(BadAsk, match="already"):
            await client.load_adapter("second", path)
        with pytest.raises(BadAsk, match="adapter_config"):
            await client.load_adapter("third", str(tmp_path))
        await client.unload_adapter("second")
        with pytest.raises(BadAsk) as caught:
            await client.generate(asks[2])
        assert caught.value.param == "adapter"
        await other.close()

    try:
        run(home, test)
        until(lambda: is_empty(home.engine))
    finally:
        home.close()


def test_hazard_b1_an_engine_that_crashes_tells_its_clients(model: str) -> None:
    """Requests in flight end with its error; later ones hear that it is gone."""
    home = LocalHome(model, {"device": "cpu", "max_rows": 2})
    crashes: list[str] = []
    home.hub.crashed = crashes.append

    def crash() -> float:
        raise RuntimeError("planted")

    async def test(client: EngineClient) -> None:
        generation = await client.generate(Ask((1,), LONG))
        home.engine._loop._admit = crash  # type: ignore[method-assign, assignment]
        told = [one async for deltas in generation for one in deltas]
        assert told[-1].end is not None
        assert told[-1].end.finish_reason == "error"
        assert "planted" in (told[-1].end.error or "")
        with pytest.raises(EngineGone, match="planted"):
            await client.generate(Ask((1,)))

    run(home, test)
    until(lambda: crashes)
    assert "planted" in crashes[0]
    home.close()


def test_a_fault_at_the_tokens_of_a_step_ends_the_engine(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that raises hears no more: its clients would wait for ever."""
    home = LocalHome(model, {"device": "cpu", "max_rows": 2})

    def fault(router: TokenRouter, output: object) -> None:
        raise RuntimeError("planted")

    async def test() -> None:
        client = EngineClient(home.client_socket(), home)
        await client.ready()
        with monkeypatch.context() as planted:
            planted.setattr(TokenRouter, "__call__", fault)
            with pytest.raises(EngineGone, match=r"could not be handed on: .*planted"):
                await tokens(await client.generate(Ask((1,), LONG)))

    try:
        asyncio.run(test())
    finally:
        home.close()


def test_random_traffic_leaves_nothing_behind(home: LocalHome) -> None:
    """Answers that end, are left, run out of time or are refused, of clients that come and go: each
    answer that is read to its end has one end, and the tokens that it should.
    """
    ends = 0

    async def one(client: EngineClient, seed: int) -> None:
        nonlocal ends
        draw = random.Random(seed)
        most = draw.choice([1, 3, 40, 400])
        params: dict[str, Any] = {"max_new_tokens": most, "ignore_eos": True, "temperature": 1.0}
        params |= draw.choice([{}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"seed": -1}])
        params |= draw.choice([{}, {}, {}, {"regex": "[a-f]{3,500}"}, {"choice": ["yes", "no"]}])
        n, late = draw.choice([1, 1, 2, 3]), draw.choice([None, None, 0.05])
        ask = Ask(tuple(draw.choices(range(256), k=draw.choice([1, 20, 600]))), params, n, 0, late)
        leaves_after = draw.choice([0, 1, 3, None, None, None])
        try:
            generation = await client.generate(ask)
        except (BadAsk, Busy) as error:
            assert isinstance(error, Busy) or params.get("seed") == -1  # noqa: PT017
            return
        found: list[list[Delta]] = [[] for _ in range(n)]
        async with generation:
            looks = 0
            async for deltas in generation:
                for delta in deltas:
                    found[delta.index].append(delta)
                looks += 1
                if looks == leaves_after:
                    return
        for answer in found:
            assert [delta.end is not None for delta in answer[:-1]].count(True) == 0
            end, count = answer[-1].end, sum(len(delta.tokens) for delta in answer)
            assert end is not None
            if end.finish_reason == "length":
                assert count == most
            assert end.finish_reason in ("length", "stop", "timeout")
            ends += 1

    async def endless(client: EngineClient) -> None:
        while True:
            with suppress(Busy):
                await tokens(await client.generate(Ask((1,), LONG)))

    async def test(client: EngineClient) -> None:
        await asyncio.gather(*(one(client, seed) for seed in range(30)))
        other = EngineClient(home.client_socket())
        await other.ready()
        leaving = asyncio.gather(endless(other), *(one(other, seed) for seed in range(100, 160)))
        staying = asyncio.gather(*(one(client, seed) for seed in range(200, 260)))
        await asyncio.sleep(0.2)
        await other.close()
        with pytest.raises(EngineGone):
            await leaving
        await staying
        await asyncio.sleep(0.1)
        assert not client._answers

    run(home, test)
    assert ends > 30


def test_many_answers_are_cancelled_in_no_time() -> None:
    """Each was looked for among all: 16384 of them took the event loop seconds."""

    async def test() -> list[int]:
        inbox = Inbox(1, 2**14, scores_prompt=False)
        for answer in inbox.answers:
            answer.push(1)
        begun = time.thread_time()
        numbers = inbox.cancel(None)
        assert time.thread_time() - begun < 0.5
        return numbers

    assert asyncio.run(test()) == [*range(1, 2**14 + 1)]
