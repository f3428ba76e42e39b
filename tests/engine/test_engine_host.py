"""The engine on the real host runtime with a tiny random model: it does not grow, and it tells
everybody of a forward that fails.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from photon_ext.engine import Engine
from photon_ext.errors import EngineDeadError
from photon_ext.models.decoder import Decoder
from photon_ext.runtime import Runtime
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.simulated import engine_of
from tests.engine.tiny import CONFIG, WEIGHTS

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(work: Callable[[], None]) -> tuple[int, int]:
    """Objects and resident bytes that are left of some work."""
    gc.collect()
    objects, resident = len(gc.get_objects()), resident_bytes()
    work()
    gc.collect()
    return len(gc.get_objects()) - objects, resident_bytes() - resident


@pytest.mark.parametrize("graph", [True, False])
def test_hazard_19_nothing_of_a_step_outlives_its_commit(graph: bool) -> None:
    """Plain and constrained requests, which sample late: 10,000 steps leave no object behind, and
    no memory.

    One object a step would be 10,000, one row of logits (2 KiB) 20 MiB.
    """
    free = SamplingParams(max_new_tokens=250, ignore_eos=True)
    constrained = SamplingParams(
        max_new_tokens=250, ignore_eos=True, constraint=from_allowed_ids(range(100))
    )
    options = {
        "max_rows": 2,
        "max_len": 300,
        "chunk": 8,
        "buckets": (1, 2),
        "depth": 2,
        "graph": graph,
    }

    with Engine.from_weights(CONFIG, WEIGHTS, **options) as engine:

        def serve(rounds: int) -> None:
            for _ in range(rounds):
                engine.generate([[1, 2, 3]] * 2, free)
                engine.generate([[1, 2, 3], [4]], [free, constrained])

        serve(2)  # warm-up: caches, freed blocks of the allocator
        before = engine.stats().steps
        objects, resident = grown(lambda: serve(20))
        assert engine.stats().steps - before >= 10_000
    assert objects < 200
    assert resident < 3 * MIB


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forward_that_raises_at_run_time_ends_every_open_request_once(depth: int) -> None:
    """Eager mode: the forward is the caller's code at every step, not only while it is captured."""
    decoder = Decoder(
        CONFIG, WEIGHTS, max_step_tokens=8, max_segments=2, max_len=64, page_size=16, num_pages=9
    )
    submitted = threading.Event()
    armed = False
    calls = 0

    def forward(step: object) -> None:
        nonlocal calls
        calls += armed
        assert not armed or submitted.wait(60)
        if calls > 5:
            raise ZeroDivisionError("the model divides by zero")
        decoder.forward(step)

    runtime = Runtime(max_rows=2, max_len=64, depth=depth, device="cpu", page_size=16)
    engine = engine_of(runtime, forward, CONFIG.vocab, 8, chunk=8, graph=False)
    armed = True
    # two run, three wait
    requests = [engine.submit([n, n + 1], SamplingParams(max_new_tokens=40)) for n in range(5)]
    submitted.set()
    for request in requests:
        events = list(request.iter())
        assert [event.finish_reason for event in events if event.finish_reason is not None] == [
            "error"
        ]
        assert "ZeroDivisionError: the model divides by zero" in (events[-1].error or "")
        assert request.result(0).error == events[-1].error
    with pytest.raises(EngineDeadError, match="the model divides by zero") as raised:
        engine.submit([1])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    engine.close()


@pytest.mark.parametrize("timing", [True, False])
def test_step_gaps_are_measured_unless_that_is_turned_off(timing: bool) -> None:
    """On a host whose step follows another at once a gap may be of no time at all, but it is
    counted.
    """
    options = {} if timing else {"timing": False}
    with Engine.from_weights(CONFIG, WEIGHTS, max_rows=1, max_len=32, **options) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, ignore_eos=True))
        stats = engine.stats()
    assert (stats.gap_count > 0, stats.step_gap_us is not None) == (timing, timing)
