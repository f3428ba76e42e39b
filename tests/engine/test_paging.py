"""Pages on demand, the prefix cache and preemption: the whole loop against a model, step by step on
the simulated device, where every page's content can be looked at.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from photon_ext.engine.request import Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.errors import ConfigError
from photon_ext.runtime import StepKind
from photon_ext.runtime.step import StepPlan
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Planner
from photon_ext.scheduling.policy import POLICIES
from photon_ext.testing import Request as ToyRequest
from photon_ext.testing import ToyModel
from tests.conftest import EXAMPLES
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import expected_tokens
from tests.engine.stepped import ADAPTERS, MARKED, PAGE, TOY, Stepped, adapted

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
MODELS = pytest.mark.parametrize("model", [TOY, MARKED], ids=["usual", "exact"])


class PagingMachine(RuleBasedStateMachine):
    """Requests come, run, are preempted, cancelled and late; each token is that of a run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Request, ToyRequest, str | None]] = []
        self.leaving: set[Request] = set()  # who may end before its answer does

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_pages=st.integers(16, 24),
        cached=st.booleans(),
        model=st.sampled_from([TOY, MARKED]),
        prefill=st.sampled_from(["mixed", "separate"]),
        policy=st.sampled_from([*POLICIES]),
    )
    def begin(
        self, depth: int, num_pages: int, cached: bool, model: ToyModel, prefill: str, policy: str
    ) -> None:
        self.model, self.now = model, time.monotonic()
        self.stepped = Stepped(
            depth,
            num_pages,
            model=model,
            slots=2,
            prefix_cache=cached,
            exact=model is MARKED,
            prefill=prefill,
            policy=policy,
        )
        self.stepped.loop._deadlines.clock = lambda: self.now

    @rule(
        prefix=st.integers(0, 14),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        cap=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 1.0]),
        lora=st.sampled_from([None, None, *ADAPTERS]),
        priority=st.integers(-1, 1),
        seconds=st.sampled_from([None, None, 5.0, 20.0]),
    )
    def submit(
        self,
        prefix: int,
        own: list[int],
        cap: int,
        temperature: float,
        lora: str | None,
        priority: int,
        seconds: float | None,
    ) -> None:
        prompt = [*range(10, 10 + prefix), *own]
        params = SamplingParams(cap, temperature, seed=cap)
        deadline = None if seconds is None else self.now + seconds
        given: dict[str, Any] = {"lora": lora, "priority": priority, "deadline": deadline}
        request = self.stepped.submit(prompt, params, **given)
        if deadline is not None:
            self.leaving.add(request)
        expected = ToyRequest(prompt, cap, temperature=temperature, seed=cap)
        self.asked.append((request, expected, lora))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.stepped.turn()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request, *_ = data.draw(st.sampled_from(self.asked))
        request.cancel()
        self.leaving.add(request)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def i9_i12_i13_pages_are_where_they_should_be(self) -> None:
        if hasattr(self, "stepped"):
            self.stepped.check()

    def teardown(self) -> None:
        if not hasattr(self, "stepped"):
            return
        self.stepped.run()
        for request, expected, lora in self.asked:
            output, tokens = request.result(0), adapted(self.model, lora).generate(expected)
            if output.finish_reason in ("cancelled", "timeout"):
                assert request in self.leaving
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert (output.token_ids, output.finish_reason) == (tokens, "length")
        self.stepped.check()
        assert self.stepped.scheduler.pool.held == 0
        adapters = self.stepped.engine._adapters._adapters.values()
        assert [one.rows for one in adapters] == [0] * len(ADAPTERS)
        self.stepped.engine.close()


TestPaging = PagingMachine.TestCase
TestPaging.settings = settings(max_examples=20 * EXAMPLES, stateful_step_count=30)


@MODELS
@DEPTHS
@pytest.mark.parametrize("cached", [True, False])
def test_i15_and_hazard_12_preempted_requests_give_the_tokens_of_an_undisturbed_run(
    depth: int, cached: bool, model: ToyModel
) -> None:
    preemptions = 0
    for num_pages in range(16, 34, 6 if EXAMPLES == 1 else 3):
        rng, exact = random.Random(num_pages), model is MARKED
        stepped = Stepped(depth, num_pages, model=model, prefix_cache=cached, exact=exact)
        asked = []
        for index in range(12):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            cap, temperature = rng.randint(20, 40), rng.choice([0.0, 1.0])
            rest = {"temperature": temperature, "seed": index, "top_p": 0.9}
            if index % 2:
                rest |= {"stop_token_ids": (5, 60, 117, 200), "min_tokens": cap - 5}
            if index % 3 == 0:
                rest |= {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {7: 3}}
            params = SamplingParams(cap, **rest)
            expected = ToyRequest(prompt, cap, **rest)
            asked.append((stepped.submit(prompt, params), expected))
        while stepped.turn():
            stepped.check()
        for request, expected in asked:
            tokens = request.result(0).token_ids
            assert tokens == model.generate(expected)
            assert len(tokens) >= expected.params.min_tokens
        now = stepped.engine.stats()
        assert cached or now.prefix_hit_tokens == 0
        preemptions += now.preemptions
    assert preemptions > 2


@DEPTHS
def test_i12_pages_are_counted_and_tables_name_no_others(depth: int) -> None:
    stepped = Stepped(depth, 26)
    for first in range(8):
        stepped.submit([first % 2, *range(9), first], SamplingParams(30))
    lengths = set()
    while stepped.turn():
        stepped.check()
        lengths |= {len(row.pages) for row in stepped.pipeline.rows}
    assert len(lengths) > 2, "rows grow"
    assert stepped.scheduler.pool.held == 0


@DEPTHS
def test_i13_a_cached_page_is_not_written_again(depth: int) -> None:
    """Rows that found it go on behind it, and end, while others find it."""
    stepped, prompt = Stepped(depth, 40), list(range(30, 42))
    stepped.submit(prompt, SamplingParams(1))
    stepped.run()
    cache = stepped.scheduler._pager._cache
    pages = cache.match(prompt, None).pages
    before = stepped.forward._kv[pages].clone()
    for last in range(6):
        stepped.submit([*prompt[: 8 + last % 4], last], SamplingParams(12))
    while stepped.turn():
        stepped.check()
        assert stepped.forward._kv[pages].equal(before)
    assert stepped.engine.stats().prefix_hit_tokens == 6 * 8


class EvenTokens:
    """Allows the even ids of the vocabulary."""

    finished = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def fill_bitmask(self, words: memoryview) -> None:
        for word in range(len(words)):
            words[word] = 0x55555555

    def advance(self, token: int) -> None:
        self.taken.append(token)


@MODELS
@DEPTHS
def test_a_preempted_request_keeps_its_constraint(depth: int, model: ToyModel) -> None:
    def serve(num_pages: int) -> tuple[list[tuple[int, ...]], int]:
        stepped = Stepped(depth, num_pages, model=model, exact=model is MARKED)
        constraints = [EvenTokens() for _ in range(4)]
        requests = [
            stepped.submit([index], SamplingParams(40, constraint=constraint))
            for index, constraint in enumerate(constraints)
        ]
        stepped.run()
        tokens = [request.result(0).token_ids for request in requests]
        assert [tuple(constraint.taken) for constraint in constraints] == tokens
        assert not any(token % 2 for each in tokens for token in each)
        return tokens, stepped.scheduler.stats.preemptions

    expected, undisturbed = serve(64)
    tokens, preemptions = serve(26)
    assert undisturbed == 0 < preemptions
    assert tokens == expected


@DEPTHS
def test_while_pages_cover_every_cap_rows_hold_all_of_theirs_and_steps_are_quiet(
    depth: int,
) -> None:
    stepped = Stepped(depth, 64)
    for first in range(4):
        stepped.submit([first], SamplingParams(40))
    stepped.turn()
    stepped.turn()
    assert [len(row.pages) for row in stepped.pipeline.rows] == [10] * 4
    stepped.run()
    now = stepped.engine.stats()
    assert now.quiet_steps > 0.9 * now.decode_steps


@DEPTHS
def test_pages_are_appended_for_all_rows_at_once(depth: int) -> None:
    """12 pages cover three rows of 40 tokens only until one of them has ended."""
    stepped = Stepped(depth, 36, prefix_cache=False)
    for first in range(4):
        stepped.submit([first], SamplingParams(40))
    sends = steps = 0
    while stepped.turn():
        now = stepped.engine.stats()
        sends, steps = now.decode_steps - now.quiet_steps, now.decode_steps
    assert now.preemptions <= 1
    assert sends <= 0.3 * steps


@DEPTHS
def test_who_gets_a_page_rides_at_once_though_another_gets_none(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, drains = Stepped(depth, 18, prefill="mixed", prefix_cache=False), 0
    plan = Planner.plan

    def watched(planner: Planner, previous: StepKind | None) -> StepPlan:
        nonlocal drains
        decode, made = stepped.pipeline.running_set.decode, plan(planner, previous)
        fed = {row for row, _ in made.appends}
        assert fed.intersection(decode) <= {*made.decode, *made.drains}
        drains += len(made.drains)
        return made

    monkeypatch.setattr(Planner, "plan", watched)
    for first in range(4):
        stepped.submit([first], SamplingParams(40))
    stepped.run()
    assert drains > 0


@DEPTHS
def test_requests_with_the_same_prompt_wait_for_the_pages_of_the_first(depth: int) -> None:
    prompt = list(range(50, 50 + 22))
    stepped = Stepped(depth, 64)
    requests = [stepped.submit([*prompt, last], SamplingParams(3)) for last in range(4)]
    other = stepped.submit([1, 2, 3], SamplingParams(3))
    for _ in range(3):
        stepped.turn()
    assert stepped.engine.stats().waiting == 3, "who has another prompt overtakes them"
    stepped.run()
    outputs = [request.result(0) for request in requests]
    assert [output.cached_tokens for output in outputs] == [0, 20, 20, 20]
    assert other.result(0).cached_tokens == 0
    for last, output in enumerate(outputs):
        assert list(output.token_ids) == expected_tokens([*prompt, last], 3, VOCAB)
    now = stepped.engine.stats()
    assert (now.prompt_tokens, now.prefix_hit_tokens) == (4 * 23 + 3, 60)


@DEPTHS
@pytest.mark.parametrize("cap", [1, 2])
def test_pages_of_a_prompt_are_shared_though_its_answer_is_one_token(depth: int, cap: int) -> None:
    """The step that writes the last of its pages is the one that ends it."""
    prompt = list(range(50, 56))
    stepped = Stepped(depth, 64)
    requests = [stepped.submit([*prompt, last], SamplingParams(cap)) for last in range(4)]
    stepped.run()
    assert [request.result(0).cached_tokens for request in requests] == [0, 4, 4, 4]
    for last, request in enumerate(requests):
        tokens = list(request.result(0).token_ids)
        assert tokens == expected_tokens([*prompt, last], cap, VOCAB)


@DEPTHS
def test_who_waits_for_a_cancelled_requests_pages_begins_itself(depth: int) -> None:
    prompt = list(range(50, 50 + 30))
    stepped = Stepped(depth, 64)
    first, second = (stepped.submit([*prompt, last], SamplingParams(3)) for last in range(2))
    stepped.turn()
    first.cancel()
    stepped.run()
    assert first.result(0).finish_reason == "cancelled"
    assert list(second.result(0).token_ids) == expected_tokens([*prompt, 1], 3, VOCAB)


@DEPTHS
def test_a_turn_of_a_chat_costs_the_new_tokens_only(depth: int) -> None:
    stepped, history = Stepped(depth, 64), [5, 6, 7]
    for turn in range(3):
        request = stepped.submit(history, SamplingParams(12))
        stepped.run()
        output = request.result(0)
        assert list(output.token_ids) == expected_tokens(history, 12, VOCAB)
        # the last token was not fed; what does not fill a page is computed again
        known = max(len(history) - 4, 0) // PAGE * PAGE if turn else 0
        assert output.cached_tokens == known
        history = [*history, *output.token_ids, 8, 9, 10]


@DEPTHS
def test_a_cached_prompt_of_full_pages_keeps_its_answer_too(depth: int) -> None:
    """Its last page is written once more, as its last token has to be fed."""
    stepped, prompt = Stepped(depth, 64), list(range(50, 50 + 2 * PAGE))
    for cap, cached in ((1, 0), (3 * PAGE + 2, PAGE)):
        request = stepped.submit(prompt, SamplingParams(cap))
        stepped.run()
        assert request.result(0).cached_tokens == cached
    history = [*prompt, *request.result(0).token_ids]
    now = stepped.engine.stats()
    assert (now.pages_held, now.pages_cached) == (0, 5)
    request = stepped.submit([*history, 8, 9], SamplingParams(4))
    stepped.run()
    assert request.result(0).cached_tokens == 5 * PAGE
    assert list(request.result(0).token_ids) == expected_tokens([*history, 8, 9], 4, VOCAB)


@DEPTHS
def test_without_a_prefix_cache_nothing_is_kept(depth: int) -> None:
    stepped = Stepped(depth, 64, prefix_cache=False)
    for _ in range(2):
        request = stepped.submit(list(range(20)), SamplingParams(3))
        stepped.run()
        assert request.result(0).cached_tokens == 0
    assert stepped.engine.stats().pages_free == 64


def test_a_salt_keeps_tenants_apart() -> None:
    stepped, cached = Stepped(2, 64), []
    for salt in (None, "a", "b", "a", None):
        request = stepped.submit(list(range(20)), SamplingParams(3), cache_salt=salt)
        stepped.run()
        cached.append(request.result(0).cached_tokens)
    assert cached == [0, 0, 0, 16, 16]


def test_a_salt_is_what_its_string_says_whatever_its_class() -> None:
    class Tenant(str):
        __hash__ = None  # type: ignore[assignment]

    stepped, cached = Stepped(2, 64), []
    for salt in ("a", Tenant("a")):
        request = stepped.submit(list(range(20)), SamplingParams(3), cache_salt=salt)
        stepped.run()
        cached.append(request.result(0).cached_tokens)
    assert cached == [0, 16]


def test_a_salt_that_is_no_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_salt is 3; give a string, or None"):
        RequestOptions.of(cache_salt=3)
