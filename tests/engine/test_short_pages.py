"""Pages are short, or being written: who rides, who waits, and what a turn looks at."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from photon_ext.engine import Engine, StepOutput
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.weights import random_weights
from photon_ext.observe.meter import MeterSnapshot
from photon_ext.runtime import Row, StepPlan
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import pager as pager_module
from photon_ext.scheduling.prefix_cache import TOKEN_BYTES, PrefixCache
from photon_ext.testing.stub import StubDevice
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import engine_of, expected_tokens
from tests.engine.stepped import PAGE, Stepped

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PAGE_SIZE = 16


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """By the last token of a prompt, how many of its pages were looked for."""
    counts: Counter[int] = Counter()
    match, prompts = PrefixCache.match, dict[bytes, bytes]()

    class Prompt(bytes):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            counts[int.from_bytes(bytes(self)[-TOKEN_BYTES:], sys.byteorder)] += 1
            return super().__getitem__(key)

    def watched(self: PrefixCache, tokens: bytes, root: Any) -> Any:
        return match(self, prompts.setdefault(tokens, Prompt(tokens)), root)

    monkeypatch.setattr(PrefixCache, "match", watched)
    return counts


@DEPTHS
def test_answers_of_one_token_leave_their_prompt_to_others(depth: int) -> None:
    """The step that ends such a row is the one that writes the last of its prompt."""
    prompt, stepped = list(range(50, 50 + 22)), Stepped(depth, 64)
    requests = [stepped.submit([*prompt, last], SamplingParams(1)) for last in range(4)]
    while stepped.turn():
        stepped.check()
    outputs = [request.result(0) for request in requests]
    assert [output.cached_tokens for output in outputs] == [0, 20, 20, 20]
    for last, output in enumerate(outputs):
        assert list(output.token_ids) == expected_tokens([*prompt, last], 1, VOCAB)


@DEPTHS
def test_a_prompt_that_waits_for_pages_is_not_looked_up_each_turn(
    depth: int, looked_up: Counter[int]
) -> None:
    stepped = Stepped(depth, 18, rows=2)
    stepped.submit([1], SamplingParams(60))
    waits = stepped.submit([*range(40), 99], SamplingParams(2))
    turns = 0
    while (not waits.cached_tokens and stepped.scheduler.waiting_count) or not turns:
        stepped.turn()
        turns += 1
    assert turns > 50
    assert looked_up[99] < 10
    stepped.run()
    assert list(waits.result(0).token_ids) == expected_tokens([*range(40), 99], 2, VOCAB)


@DEPTHS
def test_who_waits_for_a_prompt_to_be_written_wakes_once(
    depth: int, looked_up: Counter[int]
) -> None:
    prompt, stepped = list(range(40)), Stepped(depth, 64)
    requests = [stepped.submit([*prompt, 90 + last], SamplingParams(2)) for last in range(3)]
    stepped.run()
    assert [request.result(0).cached_tokens for request in requests] == [0, 40, 40]
    assert max(looked_up[91], looked_up[92]) <= 3 * len(prompt) // PAGE


@DEPTHS
def test_rows_that_got_pages_ride_though_another_has_none(depth: int) -> None:
    stepped = Stepped(depth, 37, max_len=128, prefix_cache=False)
    requests = [stepped.submit([first], SamplingParams(100)) for first in range(3)]
    planner, short = stepped.loop._planner, []
    plan = planner.plan

    def watched(previous: Any) -> StepPlan:
        made = plan(previous)
        if made.drains:
            short.append(made)
            assert {row for row, _ in made.appends} <= {*made.decode}
        return made

    planner.plan = watched  # type: ignore[method-assign]
    while stepped.turn():
        stepped.check()
    assert any(made.appends for made in short)
    for first, request in enumerate(requests):
        assert list(request.result(0).token_ids) == expected_tokens([first], 100, VOCAB)


@DEPTHS
def test_rows_are_looked_at_only_when_one_may_need_a_page(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, stepped = 0, Stepped(depth, 128, rows=16, max_len=256, prefix_cache=False)
    places = pager_module._places

    def counting(row: Row) -> int:
        nonlocal looks
        looks += 1
        return places(row)

    monkeypatch.setattr(pager_module, "_places", counting)
    for first in range(16):
        stepped.submit([first], SamplingParams(200))
    stepped.run()
    steps = stepped.engine.stats().decode_steps
    assert 0 < looks < steps


@pytest.mark.parametrize(("cached", "depth"), [(True, 2), (False, 1)])
def test_caps_far_beyond_the_answers_leave_no_rows_empty(depth: int, cached: bool) -> None:
    """A preempted request that came back only when all caps are covered would wait for all others
    to end, and keep those behind it waiting: 2 rows of 24 would be in use.
    """
    rng, running = random.Random(1), 0
    stepped = Stepped(depth, 128, rows=24, max_len=512, prefix_cache=cached)
    for index in range(60):
        stops = tuple(rng.sample(range(VOCAB), 4))
        params = SamplingParams(400, 1.0, seed=index, stop_token_ids=stops)
        stepped.submit([rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))], params)
    turns, preempted = 0, 0
    while stepped.scheduler.waiting_count or not turns:
        stepped.turn()
        turns += 1
        running += len(stepped.scheduler.running)
        waiting = [one.preemptions for one in stepped.scheduler.waiting]
        preempted = max([preempted, *waiting])
    assert running / turns > 4
    assert 1 <= preempted <= 4, "nor is one preempted again and again"
    stepped.run()


@pytest.mark.parametrize("device", ["stub", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_where_pages_are_appended_nine_of_ten_decode_steps_of_64_rows_send_nothing(
    device: str,
) -> None:
    """Caps are half of the pool: the first row has all of its pages, and the others grow. With a
    model rows begin at different steps, and their pages end at different ones.
    """
    rows, cap, seen = 64, 1400 * PAGE_SIZE, dict[int, MeterSnapshot]()
    options: dict[str, Any] = {"num_pages": 2800, "prefill": "mixed", "prefix_cache": False}
    with _engine(device, rows, 2 * cap, options) as engine:

        def listen(output: StepOutput) -> None:
            if len(output.counts) == rows:
                now = engine.stats()
                seen.setdefault(now.decode_steps, now)
                if len(seen) == 201:
                    for request in requests:
                        request.cancel()

        engine.listen(listen)
        params = SamplingParams(cap, ignore_eos=True)
        requests = engine.submit([1, 2, 3], params, n=rows)
        for request in requests:
            request.result()
    before, *_, after = list(seen.values())[:201]
    assert after.preemptions == 0
    assert after.pages_held > before.pages_held + 8 * rows
    steps = after.decode_steps - before.decode_steps
    assert 0.9 * steps <= after.quiet_steps - before.quiet_steps < steps


def _engine(device: str, rows: int, max_len: int, options: dict[str, Any]) -> Engine:
    """On the stub, or with a model of random weights."""
    if device == "stub":
        stub = StubDevice(rows, max_len=max_len, page_size=PAGE_SIZE)
        return engine_of(stub, lambda step: None, vocab_size=32, **options)
    config = ModelConfig(Family.QWEN3, 128, 2, 4, 2, 128, 256, 203, max_positions=max_len)
    weights = random_weights(config, torch.bfloat16, torch.device(device))
    sizes = {"max_rows": rows, "max_len": max_len, "page_size": PAGE_SIZE, "chunk": 16}
    return Engine.from_weights(config, weights, None, **sizes, **options)


@DEPTHS
def test_the_first_step_does_not_wait_for_the_admission_of_all_who_come_at_once(
    depth: int,
) -> None:
    stepped = Stepped(depth, 4 * 40, rows=40, max_len=16)
    requests = [stepped.submit([first], SamplingParams(9)) for first in range(40)]
    held = []
    for _ in range(3):
        stepped.turn()
        held.append(stepped.scheduler.rows_held)
    assert held == [16, 32, 40]
    assert stepped.engine.stats().steps > 0
    stepped.run()
    for first, request in enumerate(requests):
        assert list(request.result(0).token_ids) == expected_tokens([first], 9, VOCAB)
