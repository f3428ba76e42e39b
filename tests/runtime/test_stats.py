"""What the pipeline counts: idle for want of work is neither a gap nor a wait, and a step that
sends masks is not quiet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from photon_ext.runtime import Pipeline, RowParams, Runtime
from photon_ext.testing import Driver, Eager, Request, SimRuntime, ToyForward
from tests.runtime.test_failure import VOCAB, Forward

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
TOKENS = 4


def simulated(depth: int) -> Pipeline:
    """On a device that has always done what was enqueued."""
    runtime = SimRuntime(depth=depth, chooser=Eager())
    return Pipeline(runtime, ToyForward(runtime, VOCAB), vocab_size=VOCAB)


def tick_while_busy(pipeline: Pipeline) -> None:
    while pipeline.busy:
        pipeline.tick()


def call_by_call(pipeline: Pipeline) -> None:
    """Ends with a launch that finds nothing to do."""
    while pipeline.launch() is not None or pipeline.inflight:
        pipeline.commit()


LOOPS = pytest.mark.parametrize(
    "loop", [tick_while_busy, call_by_call], ids=lambda loop: loop.__name__
)


@DEPTHS
@LOOPS
def test_time_between_bursts_is_no_gap(depth: int, loop: Callable[[Pipeline], None]) -> None:
    pipeline = Pipeline(
        Runtime(max_rows=2, max_len=32, depth=depth, device="cpu", timing=True),
        Forward(),
        vocab_size=VOCAB,
        chunk=8,
    )
    for burst in range(1, 4):
        pipeline.admit([1, 2], RowParams(TOKENS))
        loop(pipeline)
        assert pipeline.stats.gap_count == len(pipeline.stats.gaps_us) == burst * (TOKENS - 1)


@DEPTHS
@LOOPS
def test_a_burst_that_finds_the_device_idle_did_not_keep_it_waiting(
    depth: int, loop: Callable[[Pipeline], None]
) -> None:
    pipeline = simulated(depth)
    waits = [0]
    for _ in range(3):
        pipeline.admit((1, 2), RowParams(TOKENS))
        loop(pipeline)
        waits.append(pipeline.stats.device_waits)
    assert waits == [burst * waits[1] for burst in range(4)]


def test_a_row_admitted_by_the_last_turn_of_a_burst_keeps_the_device_waiting() -> None:
    """There was work all along: the gap is the host's."""
    pipeline = simulated(1)
    pipeline.admit((1, 2), RowParams(1))
    pipeline.tick(on_event=lambda event: pipeline.admit((3,), RowParams(1)))
    pipeline.tick()
    assert (pipeline.stats.steps, pipeline.stats.device_waits) == (2, 1)


@DEPTHS
def test_a_step_that_sends_masks_is_not_quiet(depth: int) -> None:
    driver = Driver(SimRuntime(depth=depth))
    driver.run(Request((1, 2), 12, allowed=lambda tokens: range(8)))
    assert driver.pipeline.stats.quiet_steps == 0
