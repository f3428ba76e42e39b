"""A request ends in any state, by a cancel, its deadline, `close` or a crash: one final event, the
tokens of an undisturbed run up to there, and nothing of it left.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from photon_ext.engine.request import Request
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Sequence, SequenceState
from tests.engine.byte_tokenizer import VOCAB
from tests.engine.simulated import expected_tokens
from tests.engine.stepped import Stepped

PROMPT, CAP = list(range(20)), 30


def released(stepped: Stepped) -> Sequence | None:
    """It was preempted, and is not in line again yet. It drains within one turn."""
    found = (stepped.scheduler.sequence_of(row) for row in stepped.scheduler.released)
    return next((one for one in found if not one.ended), None)


def waits_again(stepped: Stepped) -> Sequence | None:
    return next((one for one in stepped.scheduler.waiting if one.preemptions), None)


def waits(stepped: Stepped) -> Sequence | None:
    return next(iter(stepped.scheduler.waiting), None)


def deferred(stepped: Stepped) -> Sequence | None:
    return next(iter(stepped.scheduler._deferred), None)


def prefills(stepped: Stepped) -> Sequence | None:
    found = (one for one in rows(stepped) if one.row is not None and one.row.wants_prefill)
    return next((one for one in found if one.row is not None and one.row.prefilled), None)


def decodes(stepped: Stepped) -> Sequence | None:
    found = (one for one in rows(stepped) if one.row is not None and one.row.launched > 3)
    return next((one for one in found if one.state is SequenceState.RUNNING), None)


def rows(stepped: Stepped) -> list[Sequence]:
    return [stepped.scheduler.sequence_of(row) for row in stepped.pipeline.rows]


STATES = [released, waits_again, waits, deferred, prefills, decodes]


def serve(depth: int) -> tuple[Stepped, list[tuple[Request, list[int]]]]:
    """More than there are pages and rows for, and the first two begin alike."""
    stepped, asked = Stepped(depth, 26, rows=3), []
    for prompt in (PROMPT, PROMPT, [1], [2], [3], [4]):
        asked.append((stepped.submit(prompt, SamplingParams(CAP)), prompt))
    return stepped, asked


def turn_until(stepped: Stepped, state: Callable[[Stepped], Sequence | None]) -> Sequence:
    while (found := state(stepped)) is None:
        assert stepped.turn(), "this state never comes"
        stepped.check()
    return found


def check_outputs(stepped: Stepped, asked: list[tuple[Request, list[int]]]) -> list[str]:
    """Each has ended once, with the tokens of a run alone; returns why."""
    reasons = []
    for request, prompt in asked:
        output = request.result(0)
        expected = expected_tokens(prompt, CAP, VOCAB)
        reasons.append(output.finish_reason)
        assert list(output.token_ids) == expected[: len(output.token_ids)]
        assert output.finish_reason != "length" or len(output.token_ids) == CAP
        assert sum(event.finish_reason is not None for event in request.iter()) == 1
    return reasons


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("end", ["cancelled", "timeout"])
def test_hazard_13_one_that_ends_in_any_state_touches_no_other(
    depth: int, state: Callable[[Stepped], Sequence | None], end: str
) -> None:
    stepped, asked = serve(depth)
    sequence = turn_until(stepped, state)
    if end == "cancelled":
        sequence.sink.cancel()
    else:
        sequence.deadline = 0.0
        stepped.loop._deadlines.add(sequence)
    while stepped.turn():
        stepped.check()
    reasons = check_outputs(stepped, asked)
    assert sorted(reasons) == sorted([end, *["length"] * 5])
    scheduler = stepped.scheduler
    assert (scheduler.pool.held, scheduler.rows_held, len(scheduler.registry)) == (0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_close_in_any_state_ends_all(
    depth: int, state: Callable[[Stepped], Sequence | None]
) -> None:
    stepped, asked = serve(depth)
    turn_until(stepped, state)
    stepped.engine._queue.close()
    while stepped.turn():
        stepped.check()
    assert set(check_outputs(stepped, asked)) <= {"cancelled", "length"}
    assert stepped.scheduler.pool.held == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_crash_in_any_state_is_told_to_all(
    depth: int, state: Callable[[Stepped], Sequence | None]
) -> None:
    stepped, asked = serve(depth)
    turn_until(stepped, state)
    stepped.loop._die(OSError("no power"))
    assert set(check_outputs(stepped, asked)) <= {"error", "length"}
