"""Several answers to one prompt."""

from __future__ import annotations

import threading

import pytest

from photon_ext.errors import ConfigError, QueueFull, RequestError
from photon_ext.models.text.tokenizer import Tokenizer
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on

PROMPTS = [list(range(20)), [7, 8, 9]]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_is_the_answer_of_its_seed_and_they_share_the_prompts_pages(depth: int) -> None:
    with engine_on(WatchedDevice(depth=depth)) as engine:
        found = engine.generate(PROMPTS, SamplingParams(9, temperature=1.0, seed=5), n=3)
        alone = [
            engine.generate([prompt], SamplingParams(9, temperature=1.0, seed=seed))[0]
            for prompt in PROMPTS
            for seed in (5, 6, 7)
        ]
    assert [output.token_ids for output in found] == [output.token_ids for output in alone]
    assert len({output.token_ids for output in found}) == 6
    # pages of 4 tokens, without the last token of the prompt
    assert [output.cached_tokens for output in found] == [0, 16, 16, 0, 0, 0]


def test_submit_gives_a_request_for_each() -> None:
    """Each is streamed by itself, and cancelled by itself."""
    params = SamplingParams(9, temperature=1.0, seed=5)
    device, go_on = WatchedDevice(), threading.Event()
    with engine_on(device) as engine:
        found = engine.generate(PROMPTS[:1], params, n=3)
        requests = engine.submit(PROMPTS[0], params, n=3)
        streamed = [
            [token for event in request.iter() for token in event.token_ids] for request in requests
        ]
        device.on_step = lambda: go_on.wait(20) and None
        endless = engine.submit(PROMPTS[0], SamplingParams(4000, ignore_eos=True), n=2)
        endless[0].cancel()
        go_on.set()
        assert endless[0].result(30).finish_reason == "cancelled"
        endless[1].cancel()
        (only,) = engine.submit(PROMPTS[0], params, n=1)
        assert only.result(30).token_ids == found[0].token_ids
    assert streamed == [list(output.token_ids) for output in found]


def test_a_queue_without_room_for_all_takes_none() -> None:
    with engine_on(WatchedDevice(), max_waiting=1) as engine:
        with pytest.raises(QueueFull):
            engine.submit(PROMPTS[1], SamplingParams(1), n=1000)
        with pytest.raises(ConfigError, match=r"^n is 0; give an integer from 1"):
            engine.submit(PROMPTS[1], n=0)
        last = engine.submit(PROMPTS[1], SamplingParams(1), n=2)[1]
        assert last.result(30).finish_reason == "length"


def test_the_prompt_is_encoded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation takes milliseconds."""
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *given: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, *given)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer()) as engine:
        found = engine.generate(["Hello", "Hi"], SamplingParams(2), raw=True, n=3)
        requests = engine.submit("Hey", SamplingParams(2), raw=True, n=3)
        assert [request.result(30).prompt_tokens for request in requests] == [3, 3, 3]
    assert [output.prompt_tokens for output in found] == [5, 5, 5, 2, 2, 2]
    assert encoded == ["Hello", "Hi", "Hey"]


def test_bad_words_are_encoded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list takes a tenth of a second."""
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *given: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, *given)

    with engine_on(WatchedDevice(), tokenizer=byte_tokenizer()) as engine:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        engine.generate([[1, 2]], SamplingParams(2, bad_words=["xy"]), n=3)
    assert sorted(encoded) == [" xy", "xy"]


def test_without_a_seed_they_differ() -> None:
    with engine_on(WatchedDevice()) as engine:
        found = engine.generate(PROMPTS[:1], SamplingParams(20, temperature=1.0), n=4)
    assert len({output.token_ids for output in found}) == 4


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, 10**9])
def test_a_number_that_cannot_be_is_refused(n: object) -> None:
    with (
        engine_on(WatchedDevice()) as engine,
        pytest.raises(ConfigError, match=r"^n is .*; give an integer from 1 to 16384$"),
    ):
        engine.generate(PROMPTS, n=n)  # type: ignore[arg-type]


class Countdown:
    """Allows one id after the other; has no fresh()."""

    def __init__(self) -> None:
        self.left = 5

    @property
    def finished(self) -> bool:
        return self.left == 0

    def advance(self, token: int) -> None:
        self.left -= 1

    def fill_bitmask(self, words: memoryview) -> None:
        words[0] = 1 << self.left


def test_a_constraint_without_fresh_gives_one_answer() -> None:
    """Several would move on the state of each other."""
    prompts = PROMPTS[:1]
    with engine_on(WatchedDevice()) as engine:
        with pytest.raises(RequestError, match=r"Countdown serves one request at a time, and n is"):
            engine.generate(prompts, SamplingParams(9, constraint=Countdown()), n=2)
        one = engine.generate(prompts, SamplingParams(9, constraint=Countdown()), n=1)[0]
        two = engine.generate(prompts, SamplingParams(9, constraint=from_allowed_ids([3])), n=2)
    assert one.token_ids == (5, 4, 3, 2, 1)
    assert [output.token_ids for output in two] == [(3,) * 9] * 2
