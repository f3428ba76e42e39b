"""Prompts with embeddings that wait, leave and end in turns: whose places are whose."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from photon_ext.engine.request import Request
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Pager, Sequence
from photon_ext.scheduling.pager import Grant
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.stepped import Stepped

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PLACES = 20


def image(count: int, seed: int = 0) -> torch.Tensor:
    """Embeddings that differ, and differ from those of other seeds."""
    return 100.0 * seed + torch.arange(2.0 * count).view(count, 2)


def check(stepped: Stepped, memory: torch.Tensor) -> None:
    """Pages and places are those of who holds them; a row that is yet to read its embeddings finds
    them in its places.
    """
    pager, pool = stepped.scheduler._pager, stepped.scheduler.pool
    assert pool.free + pool.held + pool.cached == pool.num_pages
    assert pool._held == {page for one in stepped.scheduler._in_rows for page in one.pages}
    places = {one.place for one in pager._holdings.values() if one.place is not None}
    assert places == set(pager._embeds._taken)
    for row, sequence in stepped.scheduler._in_rows.items():
        place, left = pager._holdings[sequence].place, sequence.embeds
        if place is not None and left is not None:
            fed = [-2 - token for token in row.prompt_ids if -2 - PLACES < token < 0]
            assert fed == [*range(place, place + len(fed))]
            assert torch.equal(memory[fed], left[-len(fed) :])


def ask(stepped: Stepped, rng: random.Random) -> Request:
    parts: list[object] = []
    for _ in range(rng.randint(1, 3)):
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        parts.append(rng.choice([image(3), image(5, 1), image(6, 2), text]))
    stops = tuple(rng.sample(range(VOCAB), 3))
    params = SamplingParams(rng.choice([1, 4, 20, 30]), stop_token_ids=stops)
    timeout = rng.choice([None, None, None, 0.005, 10])
    return stepped.submit({"prompt_embeds": parts}, params, timeout_s=timeout)


@DEPTHS
def test_i9_whatever_leaves_or_ends_takes_no_place_or_page_along(depth: int) -> None:
    preemptions = 0
    for seed in range(6):
        rng, memory = random.Random(seed), torch.zeros(PLACES, 2)
        prefill = rng.choice(["mixed", "separate"])
        stepped = Stepped(depth, rng.choice([17, 20, 30]), embeds=memory, prefill=prefill)
        requests: list[Request] = []
        for turn in range(150):
            if turn < 100 and rng.random() < 0.4:
                requests.append(ask(stepped, rng))
            if requests and rng.random() < 0.15:
                rng.choice(requests).cancel()
            stepped.turn()
            check(stepped, memory)
        stepped.run()
        check(stepped, memory)
        assert stepped.scheduler.pool.held == 0 == len(stepped.scheduler._pager._holdings)
        ends = {request.result(0).finish_reason for request in requests}
        assert ends <= {"length", "stop", "cancelled", "timeout"}
        preemptions += stepped.engine.stats().preemptions
    assert preemptions > 0


@DEPTHS
def test_a_prompt_that_waits_for_places_is_not_granted_each_turn(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[Sequence] = Counter()
    grant = Pager.grant

    def counted(self: Pager, sequence: Sequence) -> Grant | None:
        asked[sequence] += 1
        return grant(self, sequence)

    monkeypatch.setattr(Pager, "grant", counted)
    stepped = Stepped(depth, 64, embeds=torch.zeros(60, 2))
    stepped.submit({"prompt_embeds": image(56)}, SamplingParams(4))
    waits = stepped.submit({"prompt_embeds": image(56, 1)}, SamplingParams(4))
    stepped.turn()
    sequence = stepped.scheduler.registry.find(waits.id)
    assert sequence is not None
    for _ in range(5):  # of 7 steps of 8 embeddings
        stepped.turn()
        assert stepped.scheduler.waiting_count == 1
    assert asked[sequence] == 1
    stepped.run()
    assert len(waits.result(0).token_ids) == 4
    assert asked[sequence] < 4


@DEPTHS
def test_the_embeddings_of_a_request_that_has_ended_are_given_up(depth: int) -> None:
    """What still knows it, as the list of deadlines may, does not keep their memory."""
    stepped = Stepped(depth, 64, embeds=torch.zeros(30, 2))
    ends, cancelled, waits = (
        stepped.submit({"prompt_embeds": image(20, seed)}, SamplingParams(4)) for seed in range(3)
    )
    stepped.turn()
    sequences = [
        stepped.scheduler.registry.find(request.id) for request in (ends, cancelled, waits)
    ]
    assert all(one is not None and one.embeds is not None for one in sequences)
    cancelled.cancel()
    stepped.run()
    assert [one.embeds for one in sequences if one is not None] == [None] * 3
    assert len(waits.result(0).token_ids) == 4
