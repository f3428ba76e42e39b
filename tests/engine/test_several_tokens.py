"""Rows that get two tokens in one step, on a simulated device that gives them: through commits, the
log, what listeners hear and what readers see, each request has what one token a step gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Event

import pytest

from photon_ext.engine import Output, Request
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens
from tests.engine.test_listen import Listener

LETTERS = {
    byte_tokenizer().encode(letter, False)[0]: letter for letter in "abcdefghijklmnopqrstuvwxyz"
}
# its fourth token, the first of the two of a step, is the first letter of its answer
LETTER = next(
    [n, 7]
    for n in range(VOCAB)
    if [token in LETTERS for token in expected_tokens([n, 7], 4, VOCAB)] == [False] * 3 + [True]
)
PROMPTS = [[n, 3 * n + 1] if n != 4 else LETTER for n in range(8)]
SECOND = expected_tokens(PROMPTS[2], 2, VOCAB)[1]  # the first of the two tokens of a step
THIRD = expected_tokens(PROMPTS[3], 3, VOCAB)[2]  # the second of them
PARAMS = [
    SamplingParams(9),  # the first token, and four steps
    SamplingParams(10),  # the cap lies in the middle of a step's tokens
    SamplingParams(12, stop_token_ids=[SECOND]),
    SamplingParams(12, stop_token_ids=[THIRD]),
    SamplingParams(9, stop=LETTERS[expected_tokens(LETTER, 4, VOCAB)[3]]),
    SamplingParams(11, logprobs=3),
    SamplingParams(10, logprobs=2, stop="never"),
    SamplingParams(7, seed=5, temperature=0.9),
]


def serve(
    step_tokens: int,
    depth: int,
    params: list[SamplingParams],
    gives: Callable[[int, int], int] | None = None,
    **options: object,
) -> tuple[list[Output], list[Request], Listener, WatchedDevice]:
    device = WatchedDevice(depth=depth, max_rows=3, step_tokens=step_tokens, gives=gives)
    listener, submitted = Listener(), Event()

    def wait() -> None:
        submitted.wait(20)

    device.on_step = wait  # so that the number of launches does not depend on who is faster
    with engine_on(device, tokenizer=byte_tokenizer(), **options) as engine:
        engine.listen(listener)
        requests = [engine.submit(p, own) for p, own in zip(PROMPTS, params, strict=False)]
        submitted.set()
        events = [[*request.iter()] for request in requests]
        outputs = [request.result(20) for request in requests]
    for own, output in zip(events, outputs, strict=True):
        assert tuple(token for event in own for token in event.token_ids) == output.token_ids
        assert "".join(event.text for event in own) == output.text
    return outputs, requests, listener, device


def seen(outputs: list[Output]) -> list[tuple[object, ...]]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
        for one in outputs
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [64, 9], ids=["all pages", "short pages"])
def test_two_tokens_in_a_step_are_those_of_two_steps(depth: int, num_pages: int) -> None:
    expected, *_, single = serve(1, depth, PARAMS, num_pages=num_pages)
    outputs, requests, listener, double = serve(2, depth, PARAMS, num_pages=num_pages)
    assert seen(outputs) == seen(expected)
    assert outputs[4].finish_reason == "stop", "a stop string ends in the middle of two tokens"
    listener.check(requests)
    assert double.launches < 0.8 * single.launches


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_waits_for_masks_gives_one_token_and_others_two(depth: int) -> None:
    """What was launched at most is more than what came, and is counted back."""
    params = [
        SamplingParams(9),
        SamplingParams(6, constraint=from_allowed_ids(range(60, 90))),
        SamplingParams(20),
    ]
    expected, *_ = serve(1, depth, params)
    params[1] = SamplingParams(6, constraint=from_allowed_ids(range(60, 90)))
    outputs, requests, listener, _ = serve(2, depth, params)
    assert seen(outputs) == seen(expected)
    listener.check(requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [64, 9], ids=["all pages", "short pages"])
@pytest.mark.parametrize("step_tokens", [1, 2])
def test_a_row_that_gets_no_token_in_some_steps_goes_on_and_gets_all_of_them(
    step_tokens: int, depth: int, num_pages: int
) -> None:
    def gives(launch: int, row: int) -> int:
        return Random(8 * launch + row).randint(0, step_tokens)

    def params() -> list[SamplingParams]:
        masked = SamplingParams(6, constraint=from_allowed_ids(range(60, 90)))
        return [*PARAMS[:-1], masked]

    expected, *_, full = serve(1, depth, params(), num_pages=num_pages)
    outputs, requests, listener, device = serve(
        step_tokens, depth, params(), gives, num_pages=num_pages
    )
    assert seen(outputs) == seen(expected)
    listener.check(requests)
    assert device.launches > full.launches / step_tokens
