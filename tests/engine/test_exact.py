"""`exact`: the tokens of a request do not depend on the traffic, where decode steps and chunks keep
keys and values of different bits.
"""

from __future__ import annotations

import pytest

from photon_ext.engine import StepOutput
from photon_ext.engine.request import Request
from photon_ext.sampling import SamplingParams
from photon_ext.testing import Request as ToyRequest
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.stepped import MARKED, Stepped

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
NEW = 40


def crowd(stepped: Stepped, count: int = 6) -> list[Request]:
    """Requests of prompts of 5 tokens that begin alike in pairs, half of them sampled."""
    return [
        stepped.submit([n // 2, 1, 2, 3, n], SamplingParams(NEW, float(n % 2), seed=n))
        for n in range(count)
    ]


def expected_of(count: int = 6) -> list[tuple[int, ...]]:
    """Their tokens, each alone."""
    return [
        MARKED.generate(ToyRequest([n // 2, 1, 2, 3, n], NEW, temperature=float(n % 2), seed=n))
        for n in range(count)
    ]


@DEPTHS
def test_a_preempted_request_repeats_its_decode_steps(depth: int) -> None:
    """Without `exact` a chunk computes what it has generated, and the tokens are others."""
    for exact in (True, False):
        stepped = Stepped(depth, 26, model=MARKED, exact=exact)
        requests = crowd(stepped)
        stepped.run()
        assert stepped.scheduler.stats.preemptions > 0
        tokens = [request.result(0).token_ids for request in requests]
        assert (tokens == expected_of()) == exact


@DEPTHS
def test_pages_of_answers_are_not_shared(depth: int) -> None:
    """Those of prompts are."""
    for exact in (True, False):
        stepped = Stepped(depth, 64, model=MARKED, exact=exact)
        prompt = [1, 1, 2, 3, 4]
        first = stepped.submit(prompt, SamplingParams(NEW))
        stepped.run()
        longer = [*prompt, *first.result(0).token_ids[:20]]
        second = stepped.submit(longer, SamplingParams(NEW // 2))
        stepped.run()
        assert second.result(0).cached_tokens == (4 if exact else 24)
        tokens = MARKED.generate(ToyRequest(longer, NEW // 2))
        assert (second.result(0).token_ids == tokens) == exact


@DEPTHS
def test_repeated_tokens_are_told_to_nobody_again(depth: int) -> None:
    """Neither to listeners nor to stop strings nor to who reads events meanwhile."""
    stepped = Stepped(depth, 26, model=MARKED, exact=True, tokenizer=byte_tokenizer())
    told: dict[int, list[int]] = {}

    def listen(output: StepOutput) -> None:
        for request, tokens in output.rows():
            told.setdefault(request, []).extend(tokens)

    stepped.engine.listen(listen)
    requests = crowd(stepped)
    watched = stepped.submit([9, 9], SamplingParams(NEW, stop="never comes"))
    lengths = dict.fromkeys(requests, 0)
    while stepped.turn():
        for request in requests:
            length = len(request.tokens_from(0))
            assert length >= lengths[request]
            lengths[request] = length
    assert stepped.scheduler.stats.preemptions > 0
    for request, tokens in zip(requests, expected_of(), strict=True):
        assert request.result(0).token_ids == tokens
        assert told[request.id] == list(tokens[: len(told[request.id])])
        assert len(told[request.id]) >= NEW - 1, "all but the last, which comes with the end"
    assert watched.result(0).token_ids == MARKED.generate(ToyRequest([9, 9], NEW))


@DEPTHS
@pytest.mark.parametrize("cancels", [True, False])
def test_a_request_may_leave_while_it_repeats(depth: int, cancels: bool) -> None:
    """It is cancelled, or preempted once more."""
    stepped, left = Stepped(depth, 26, model=MARKED, exact=True), None
    requests = crowd(stepped)
    while stepped.turn():
        repeating = [one for one in stepped.scheduler.running if one.repeats]
        if repeating and left is None:
            left = repeating[0]
            assert left.row is not None
            if cancels:
                left.sink.cancel()
            else:
                assert stepped.pipeline.drain(left.row)
        stepped.check()
    assert left is not None
    assert cancels or left.preemptions > 1
    for request, tokens in zip(requests, expected_of(), strict=True):
        output = request.result(0)
        if cancels and request is left.sink:
            assert output.finish_reason == "cancelled"
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens


def test_a_forward_that_does_not_repeat_itself_fails_its_request_alone() -> None:
    """A row whose repeated token is another one must not go on as if nothing had happened."""
    stepped = Stepped(2, 26, model=MARKED, exact=True)
    requests, disturbed = crowd(stepped), False
    while stepped.turn():
        repeating = [one for one in stepped.scheduler.running if one.repeats]
        if repeating and not disturbed:
            disturbed = True
            repeating[0]._repeated[-1] = (repeating[0]._repeated[-1] + 1) % VOCAB
            failed = repeating[0].sink
    assert disturbed
    assert "does not give the same bits again" in (failed.result(0).error or "")
    for request, tokens in zip(requests, expected_of(), strict=True):
        if request is not failed:
            assert request.result(0).token_ids == tokens
