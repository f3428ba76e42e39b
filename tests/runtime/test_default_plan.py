"""Which rows ride: order, chunks, caps, and the turns of prefill and decode."""

from __future__ import annotations

from photon_ext.runtime.lease import Lease
from photon_ext.runtime.planner import plan

from photon_ext.runtime.row import Row
from photon_ext.runtime.step import StepKind

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL


def row(index: int, prompt: int = 3, cap: int = 4, prefilled: int = 0, sampled: int = 0) -> Row:
    made = Row(Lease(index, 1, (index,)), tuple(range(prompt)), cap, False)
    made.prefilled, made.sampled = prefilled, sampled
    return made


def running(index: int, sampled: int = 1, cap: int = 4) -> Row:
    return row(index, prefilled=3, sampled=sampled, cap=cap)


def test_nothing_to_do_is_no_step() -> None:
    assert plan([], None, 8) is None


def test_prompts_of_several_rows_share_a_step_in_order_of_admission() -> None:
    planned = plan([row(2), row(1), row(3, prompt=9)], None, 8)
    assert planned is not None
    kind, segments = planned
    assert kind is PREFILL
    assert [(s.row.index, s.position, s.num_tokens, s.sample) for s in segments] == [
        (2, 0, 3, True),
        (1, 0, 3, True),
        (3, 0, 2, False),
    ]
    assert segments[2].tokens == (0, 1)


def test_a_chunk_continues_where_the_last_one_ended() -> None:
    long = row(1, prompt=9, prefilled=4)
    _, segments = plan([long], PREFILL, 4) or (None, ())
    assert [(s.position, s.tokens, s.sample) for s in segments] == [(4, (4, 5, 6, 7), False)]
    long.prefilled = 8
    _, segments = plan([long], PREFILL, 4) or (None, ())
    assert [(s.position, s.tokens, s.sample, s.sampled_position) for s in segments] == [
        (8, (8,), True, 8)
    ]


def test_decode_lines_are_carried_over_at_the_next_position() -> None:
    planned = plan([running(1, sampled=2), running(4, sampled=1)], DECODE, 8)
    assert planned is not None
    kind, segments = planned
    assert kind is DECODE
    assert [(s.row.index, s.position, s.num_tokens, s.sample, s.tokens) for s in segments] == [
        (1, 4, 1, True, None),
        (4, 3, 1, True, None),
    ]


def test_prefill_and_decode_take_turns_when_both_wait() -> None:
    rows = [running(1, cap=100), row(2, prompt=100)]
    kinds, previous = [], None
    for _ in range(6):
        planned = plan(rows, previous, 4)
        assert planned is not None
        previous, segments = planned
        kinds.append(previous)
        for segment in segments:
            segment.row.prefilled += segment.num_tokens if segment.tokens else 0
            segment.row.sampled += segment.sample
    assert kinds == [PREFILL, DECODE] * 3


def test_prefill_goes_on_when_nothing_decodes() -> None:
    assert (plan([row(1, prompt=9, prefilled=4)], PREFILL, 4) or [None])[0] is PREFILL


def test_hazard_9_a_cap_covered_by_steps_in_flight_is_not_launched() -> None:
    assert plan([running(1, sampled=4, cap=4)], DECODE, 8) is None
    assert plan([running(1, sampled=1, cap=1)], PREFILL, 8) is None
    planned = plan([running(1, sampled=4, cap=4), running(2, sampled=3, cap=4)], DECODE, 8)
    assert planned is not None
    assert [s.row.index for s in planned[1]] == [2]


def test_ended_rows_do_not_ride() -> None:
    ended, waiting = running(1), row(2)
    ended.lease.finalize()
    waiting.lease.finalize()
    assert plan([ended, waiting], None, 8) is None


def test_hazard_27_a_partial_prompt_is_never_sampled() -> None:
    for chunk in range(1, 12):
        long, sampled = row(1, prompt=10), []
        while long.wants_prefill:
            _, (segment,) = plan([long], PREFILL, chunk) or (None, ())
            long.prefilled += segment.num_tokens
            sampled.append(segment.sample)
        assert sampled == [False] * (len(sampled) - 1) + [True]


def test_a_row_still_prefilling_does_not_decode() -> None:
    planned = plan([row(1, prompt=9, prefilled=4), running(2)], PREFILL, 4)
    assert planned is not None
    assert [s.row.index for s in planned[1]] == [2]
