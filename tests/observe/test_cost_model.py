"""The cost model of pipelining against published figures, the loop's own counts, and bad input."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from zlib import crc32

import pytest
import torch

from photon_ext.errors import ConfigError
from photon_ext.layout import RowColumn
from photon_ext.observe.cost_model import (
    Periods,
    Workload,
    predict,
    steps_per_request,
)
from photon_ext.observe.meter import MeterSnapshot
from photon_ext.runtime.step import StepTensors
from photon_ext.sampling import SamplingParams
from photon_ext.testing import SimRuntime
from tests.engine.simulated import engine_of

# blocking ms, pipelined ms, streams, L, published prediction: moondream2 on an RTX 3090 and a B200.
PUBLISHED = [
    (5.44, 5.10, 1, 104, 0.057),
    (7.52, 6.97, 8, 113, 0.076),
    (11.74, 10.52, 32, 113, 0.111),
    (3.11, 2.63, 1, 115, 0.172),
    (4.04, 3.30, 8, 115, 0.222),
    (5.55, 3.98, 32, 104, 0.391),
]


@pytest.mark.parametrize(("block", "pipe", "streams", "length", "published"), PUBLISHED)
def test_the_formula_gives_the_published_predictions(
    block: float, pipe: float, streams: int, length: int, published: float
) -> None:
    periods = (Periods(block, block), Periods(pipe, pipe, pipe))
    found = predict(*periods, Workload(streams, length))
    assert found.formula_gain == pytest.approx(published, abs=0.005)


def test_a_step_of_dead_rows_makes_the_tax_of_one_stream_small() -> None:
    """The same loop with stops seen by the host, whose zombie is a whole forward, and by the
    device, whose zombie is none."""
    work, block = Workload(1, 110), Periods(2.5, 2.5)
    host, device = (predict(block, Periods(2.0, 2.0, dead), work) for dead in (2.0, 0.1))
    assert host.zombie_share == pytest.approx(1 / 111)
    assert device.zombie_share == pytest.approx(0.1 / 220.1)
    assert host.gain == pytest.approx(2.5 * 110 / (2.0 * 111) - 1)
    assert host.gain < device.gain < 0.25


class Drawn:
    """A forward that draws each token by its row's seed and its position."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def __call__(self, step: StepTensors) -> None:
        rows, drawn = step.row_state.tolist(), []
        for row, _, tokens, _ in step.segments.tolist():
            key = (rows[row][RowColumn.POSITION] + tokens, rows[row][RowColumn.SEED_LOW])
            drawn.append(1 + crc32(b"%d %d" % key) % (self._vocab - 1))
        step.logits = torch.zeros(len(drawn), self._vocab)
        step.logits[range(len(drawn)), drawn] = 1.0


@cache
def serve(depth: int, streams: int, requests: int, mean: int) -> tuple[MeterSnapshot, float]:
    """The real loop on the simulated device: its counters, and the mean length of its answers."""
    vocab, choose = 997, random.Random(1)
    sizes = {"max_len": 900, "page_size": 16, "max_stop_ids": 64}
    device = SimRuntime(max_rows=streams, depth=depth, **sizes)
    stops = tuple(choose.sample(range(1, vocab), vocab // mean))
    options = {"num_pages": streams * 60, "buckets": (1, 8), "chunk": 64}
    sampling = {"max_new_tokens": 800, "stop_token_ids": stops}
    with engine_of(device, Drawn(vocab), vocab, **options) as engine:
        prompts = [[choose.randrange(1, vocab)] * 3 for _ in range(requests)]
        params = [SamplingParams(seed=i, **sampling) for i in range(requests)]
        outputs = engine.generate(prompts, params)
        engine.close()
        assert all(output.finish_reason == "stop" for output in outputs)
        return engine.meter.snapshot(), sum(len(out.token_ids) for out in outputs) / requests


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("streams", "requests", "mean"), [(1, 30, 20), (8, 800, 20), (16, 600, 30)]
)
def test_steps_are_those_of_the_loop(depth: int, streams: int, requests: int, mean: int) -> None:
    counted, length = serve(depth, streams, requests, mean)
    steps = steps_per_request(Workload(streams, length), depth)
    decode = counted.decode_steps - counted.zombie_steps
    exact = streams == 1  # else rows run empty at the end of the run, which is not in the model
    assert decode == pytest.approx(requests * steps.decode, rel=1e-6 if exact else 0.06)
    if exact:
        assert counted.zombie_steps == requests * steps.dead
    prefill = counted.steps - counted.decode_steps
    assert prefill == pytest.approx(requests * steps.prefill, rel=0.08)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("streams", "prompt", "answer"), [(1, 60, 3), (8, 60, 3), (8, 30, 3), (8, 60, 1), (4, 32, 30)]
)
def test_steps_of_answers_that_end_by_their_cap_are_those_of_the_loop(
    depth: int, streams: int, prompt: int, answer: int
) -> None:
    requests = 40 * streams
    device = SimRuntime(max_rows=streams, depth=depth, max_len=128, page_size=16)
    options = {"num_pages": streams * 8, "chunk": 64, "prefix_cache": False}
    with engine_of(device, Drawn(997), 997, **options) as engine:
        engine.generate([[7] * prompt] * requests, SamplingParams(max_new_tokens=answer))
        counted = engine.meter.snapshot()
    work = Workload(streams, answer, prompt / 64 if streams > 1 else 1.0)
    steps = steps_per_request(work, depth)
    assert (steps.dead, steps.lost_rows, counted.zombie_steps) == (0, 0, 0)
    assert counted.decode_steps == pytest.approx(requests * steps.decode, rel=0.08)
    prefill = counted.steps - counted.decode_steps
    assert prefill == pytest.approx(requests * steps.prefill, rel=0.08)


def test_rows_lost_to_zombies_are_those_of_the_loop() -> None:
    """What depth 2 costs in a full batch: more decode steps for the same tokens."""
    (blocking, length), (pipelined, same) = serve(1, 8, 800, 20), serve(2, 8, 800, 20)
    assert length == same
    lost = (pipelined.decode_steps - blocking.decode_steps) * 8 / 800
    predicted = steps_per_request(Workload(8, length), 2).lost_rows
    assert lost == pytest.approx(predicted, abs=0.25)


@pytest.mark.parametrize(
    ("block", "pipe", "words"),
    [
        (5.55, 3.98, "pipelining pays (+3"),
        (2.08, 2.0, "pays a little"),
        (30.3, 30.0, "hardly pays"),
        (2.0, 2.0, "does not pay"),
    ],
)
def test_the_verdict_follows_the_gain(block: float, pipe: float, words: str) -> None:
    found = predict(Periods(block, block), Periods(pipe, pipe), Workload(32, 5000))
    assert words in found.verdict


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: steps_per_request(Workload(8, 110), 3), "depth is 3; give 1"),
        (lambda: steps_per_request(Workload(8, 110), True), "depth is True; give 1"),
        (lambda: Periods(0, 1), "decode_ms is 0; give a positive number"),
        (lambda: Periods(1, -0.1), "prefill_ms is -0.1; give a number from 0 on"),
        (lambda: Periods(1, float("nan")), "prefill_ms is nan"),
        (lambda: Workload(0, 110), "streams is 0; give an integer from 1"),
        (lambda: Workload(True, 110), "streams is True"),
        (lambda: Workload(8, 0.5), "tokens_per_request is 0.5"),
        (lambda: Workload(8, float("inf")), "tokens_per_request is inf"),
        (lambda: Workload(8, 3, 0.0), "prompt_steps is 0.0; give a positive number, or None"),
    ],
)
def test_wrong_numbers_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("length", [1e15, 1e17, 1e300])
def test_requests_of_any_length(length: float) -> None:
    found = predict(Periods(2.0, 2.0), Periods(1.0, 1.0), Workload(4, length))
    assert found.gain == pytest.approx(1.0)
