"""What applications write: iterators of prompts, progress, loops over a request, async blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from photon_ext.engine import Engine
from photon_ext.errors import ConfigError, EngineDeadError, RequestError
from photon_ext.sampling import SamplingParams
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

SHORT = SamplingParams(max_new_tokens=4)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer(TEMPLATE)) as made:
        yield made


def test_a_string_is_one_prompt_and_an_iterator_many(engine: Engine) -> None:
    (one,) = engine.generate("hi", SHORT)
    assert one.token_ids == engine.submit("hi", SHORT).result(20).token_ids
    outputs = engine.generate(([i, i] for i in range(1, 4)), SHORT, n=2)
    expected = [expected_tokens([i, i], 4, VOCAB) for i in range(1, 4) for _ in range(2)]
    assert [list(output.token_ids) for output in outputs] == expected
    assert engine.generate(iter(()), SHORT) == []


def test_progress_is_told_as_requests_end_in_any_order() -> None:
    told: list[tuple[int, int]] = []
    threads = set()

    def progress(ended: int, of: int) -> None:
        told.append((ended, of))
        threads.add(threading.get_ident())

    caps = [SamplingParams(max_new_tokens=count) for count in (20, 3, 6, 1)]
    with engine_on(WatchedDevice(max_rows=4)) as engine:
        plain = engine.generate([[i] for i in range(1, 5)], caps)
        outputs = engine.generate([[i] for i in range(1, 5)], caps, progress=progress)
        assert engine.generate([], progress=progress) == []
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    before = told[0][0]  # some may have ended when it is told first
    assert told == [*((ended, 4) for ended in range(before, 5)), (0, 0)]
    assert threads == {threading.get_ident()}


def test_what_progress_raises_cancels_the_requests(engine: Engine) -> None:
    def progress(ended: int, of: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate([[1]] * 9, SamplingParams(max_new_tokens=50), progress=progress)
    assert list(engine.submit([1, 2], SHORT).result(20).token_ids) == expected_tokens(
        [1, 2], 4, VOCAB
    )
    with pytest.raises(ConfigError, match="progress is 5; give a function, or None"):
        engine.generate([[1]], progress=5)  # type: ignore[arg-type]


def test_a_request_is_read_by_for_and_async_for(engine: Engine) -> None:
    request = engine.submit("hi", SHORT)

    async def read() -> list[Any]:
        return [event async for event in request]

    assert [*request] == [*request.iter()] == asyncio.run(read())


def test_an_engine_serves_an_async_block() -> None:
    async def serve() -> Engine:
        async with engine_on(WatchedDevice()) as engine:
            output = await engine.submit([1, 2], SHORT)
            assert list(output.token_ids) == expected_tokens([1, 2], 4, VOCAB)
        return engine

    with pytest.raises(EngineDeadError):
        asyncio.run(serve()).submit([1])


def test_a_conversation_has_several_answers_where_they_are_asked_for(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one = engine.chat(messages, SHORT)
    assert [output.token_ids for output in engine.chat(messages, SHORT, n=2)] == [one.token_ids] * 2
    assert len(engine.chat(messages, SHORT, n=1)) == 1
    with pytest.raises(ConfigError, match="n is 0"):
        engine.chat(messages, SHORT, n=0)


def test_without_a_cap_an_answer_ends_with_the_context(engine: Engine) -> None:
    (output,) = engine.generate([[1] * 10], SamplingParams(max_new_tokens=None))  # type: ignore[arg-type]
    assert (output.finish_reason, output.stop_reason) == ("length", "max_len")
    assert len(output.token_ids) == engine._input.limits.max_len - 9


def test_tokens_of_log_probabilities_have_a_text(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=3, logprobs=2)
    (output,) = engine.generate("hi", params)
    ids = engine.tokenizer.encode("hi") if engine.tokenizer else []
    assert "".join(map(engine.token_text, ids)) == "hi"
    for found in output.logprobs:
        assert all(isinstance(engine.token_text(token), str) for token, _ in found.top)
    with pytest.raises(RequestError, match="token_text holds 256; token ids of this model are 0"):
        engine.token_text(VOCAB)
    with engine_on(WatchedDevice()) as mute, pytest.raises(RequestError, match="has no tokenizer"):
        mute.token_text(5)


def test_an_engine_says_what_it_is(engine: Engine) -> None:
    told = "<Engine on cpu: 4 rows of 64 tokens, 256 ids, depth 2, tokenizer of the byte tokenizer>"
    assert repr(engine) == told
    assert repr(SamplingParams(max_new_tokens=None)).startswith(  # type: ignore[arg-type]
        f"SamplingParams(max_new_tokens={2**31 - 1}, "
    )
