"""Why a request ended: the reason, and which stop or limit it was."""

from __future__ import annotations

import threading

import pytest

from photon_ext.engine import Output, Request
from photon_ext.sampling import SamplingParams, from_allowed_ids, from_callable
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens

PROMPT = [1, 2, 3]
TOKENS = expected_tokens(PROMPT, 8, VOCAB)
EOS = TOKENS[5]


def served(params: SamplingParams, depth: int, prompt: list[int] | None = None) -> Output:
    device = WatchedDevice(depth=depth)
    with engine_on(device, tokenizer=byte_tokenizer(), eos_ids=(EOS,)) as engine:
        request = engine.submit(PROMPT if prompt is None else prompt, params)
        output = request.result(20)
        last = list(request.iter())[-1]
    assert (last.finish_reason, last.stop_reason, last.error) == (
        output.finish_reason,
        output.stop_reason,
        output.error,
    )
    return output


def raising(tokens: list[int]) -> list[int]:
    raise ValueError("no grammar")


def allowing_eos(tokens: list[int]) -> list[int]:
    return [EOS]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("params", "finish", "stop", "tokens"),
    [
        (SamplingParams(8), "stop", EOS, TOKENS[: TOKENS.index(EOS) + 1]),
        (
            SamplingParams(8, stop_token_ids=[TOKENS[1]]),
            "stop",
            TOKENS[1],
            TOKENS[: TOKENS.index(TOKENS[1]) + 1],
        ),
        (SamplingParams(2, stop="never"), "length", "max_new_tokens", TOKENS[:2]),
        (SamplingParams(2), "length", "max_new_tokens", TOKENS[:2]),
        (SamplingParams(1), "length", "max_new_tokens", TOKENS[:1]),
        (SamplingParams(8, constraint=from_allowed_ids([{7}, {8}])), "stop", "constraint", [7, 8]),
        (SamplingParams(8, constraint=from_callable(allowing_eos)), "stop", EOS, [EOS]),
        (SamplingParams(8, constraint=from_callable(raising)), "error", None, []),
    ],
    ids=[
        "end token",
        "stop id",
        "cap beside stop strings",
        "cap",
        "cap of one",
        "constraint",
        "end token beside a constraint",
        "error",
    ],
)
def test_an_output_tells_which_stop_or_limit_it_was(
    params: SamplingParams, finish: str, stop: object, tokens: list[int], depth: int
) -> None:
    output = served(params, depth)
    assert (output.finish_reason, output.stop_reason) == (finish, stop)
    assert list(output.token_ids) == tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_context_is_told_from_the_callers_cap(depth: int) -> None:
    output = served(SamplingParams(50, ignore_eos=True), depth, [9] * 60)
    assert (output.finish_reason, output.stop_reason) == ("length", "max_len")
    assert len(output.token_ids) == 5, "the context holds 64, and the last token takes no place"


@pytest.mark.parametrize("depth", [1, 2])
def test_of_several_stop_strings_the_one_that_was_found_is_told(depth: int) -> None:
    text = byte_tokenizer().decode(TOKENS)
    found = next(letter for letter in text if letter != "\ufffd")
    output = served(SamplingParams(8, stop=("never", found), ignore_eos=True), depth)
    assert (output.finish_reason, output.stop_reason) == ("stop", found)
    assert output.text == text[: text.index(found)]
    shown = served(SamplingParams(8, stop=found, include_stop=True, ignore_eos=True), depth)
    assert (shown.stop_reason, shown.token_ids) == (found, output.token_ids)
    assert shown.text == output.text + found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cap", [1, 2], ids=["the end of the text", "the last token"])
def test_a_stop_string_that_the_end_completes_is_the_reason(depth: int, cap: int) -> None:
    """Bytes that are held back until no token follows may be one, and so may the last token be."""
    prompts = ([1, 2, 3, i] for i in range(VOCAB))
    for prompt in prompts:
        tokens = expected_tokens(prompt, cap, VOCAB)
        text = byte_tokenizer().decode(tokens)
        if text.endswith("\ufffd") == (cap == 1) and text.count(text[-1]) == 1:
            break
    output = served(SamplingParams(cap, stop=text[-1], ignore_eos=True), depth, prompt)
    assert (output.finish_reason, output.stop_reason) == ("stop", text[-1])
    assert output.text == text[:-1]
    assert list(output.token_ids) == tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stop", [(), "never"], ids=["text of readers", "text of the engine"])
def test_a_stop_token_has_its_text_where_that_is_asked_for(stop: object, depth: int) -> None:
    text = byte_tokenizer().decode(TOKENS[: TOKENS.index(EOS) + 1])
    hidden = served(SamplingParams(8, stop=stop), depth)
    shown = served(SamplingParams(8, stop=stop, include_stop=True), depth)
    assert (shown.stop_reason, shown.token_ids) == (EOS, hidden.token_ids)
    assert shown.text == text
    assert hidden.text == byte_tokenizer().decode(TOKENS[: TOKENS.index(EOS)])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_request_has_no_stop(depth: int) -> None:
    device, ready = WatchedDevice(depth=depth), threading.Event()
    requests: list[Request] = []

    def cancel_on_time() -> None:
        ready.wait(20)
        if device.launches == 3:
            requests[0].cancel()

    device.on_step = cancel_on_time
    with engine_on(device, tokenizer=byte_tokenizer()) as engine:
        requests.append(engine.submit(PROMPT, SamplingParams(60)))
        ready.set()
        output = requests[0].result(20)
    assert (output.finish_reason, output.stop_reason) == ("cancelled", None)
    assert list(output.token_ids) == expected_tokens(PROMPT, len(output.token_ids), VOCAB)
