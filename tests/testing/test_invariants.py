"""check_invariants sees each rule broken: a check that never fails would let every search pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from photon_ext.row_params import RowParams
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import NEVER, RowState
from photon_ext.testing import SimError, SimRuntime, ToyForward, check_invariants


def forget_the_last_step(pipe: Pipeline) -> None:
    pipe.rows[0].join(None)
    pipe.rows[0]._last_step = NEVER


def forget_a_release(pipe: Pipeline) -> None:
    row = pipe.admit((1,), RowParams(1))
    row.move(RowState.FINISHED)


def launch_more_than_was_asked_for(pipe: Pipeline) -> None:
    pipe.rows[0]._launched = 9


def release_in_flight(pipe: Pipeline) -> None:
    row = pipe.rows[0]
    row.state = RowState.RELEASED
    del pipe.running_set._rows[row.index]


def lose_a_row(pipe: Pipeline) -> None:
    pipe._runtime.table.acquire()


def share_a_slot(pipe: Pipeline) -> None:
    pipe._inflight[1].slot = pipe._inflight[0].slot


def swap_the_steps(pipe: Pipeline) -> None:
    pipe._inflight.reverse()


def launch_over_logits(pipe: Pipeline) -> None:
    pipe._inflight[0] = replace(pipe._inflight[0], finalized=False)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (forget_the_last_step, "I3: .* was last in step -1; in flight: False"),
        (forget_a_release, "I4: .* is still registered"),
        (launch_more_than_was_asked_for, "launched 10/9.*: more was launched than was asked for"),
        (release_in_flight, "I4: .* is released, and a step in flight holds it"),
        (lose_a_row, "I9: 1 rows held and 2 free, of 4"),
        (share_a_slot, "I5: "),
        (swap_the_steps, "I2: "),
        (launch_over_logits, "I11: "),
    ],
)
def test_a_broken_invariant_is_named(fault: Callable[[Pipeline], None], named: str) -> None:
    runtime = SimRuntime(max_rows=4, depth=2)
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32)
    pipe.admit((1, 2), RowParams(9))
    pipe.launch()
    pipe.launch()
    check_invariants(pipe)
    fault(pipe)
    with pytest.raises(SimError) as raised:
        check_invariants(pipe)
    assert re.search(named, str(raised.value))
