"""How many prompt tokens a step may carry, and who rides in the steps that are planned by it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from photon_ext.row_params import RowParams
from photon_ext.runtime import StepKind, StepPlan
from photon_ext.runtime.row import Row
from photon_ext.runtime.running_set import RunningSet
from photon_ext.runtime.step_features import StepFeatures
from photon_ext.runtime.step_keys import StepKeys
from photon_ext.scheduling import PagePool, Pager, Planner, Scheduler, TokenBudget
from photon_ext.scheduling.step_times import StepLoad, StepTimes
from photon_ext.scheduling.token_budget import BACKLOGS, shares_of

KEYS = StepKeys((1, 8, 64), (16, 32, 64), mixed=True)


def budget(max_tokens: int | None = None, times: tuple[float, ...] = ()) -> TokenBudget:
    """Of a device whose decode step of 8 rows and less takes 100 us; `times`: with each share."""
    known = StepTimes(KEYS.prefill_buckets)
    for share, us in zip((0, 16, 32, 64), (100.0, *times), strict=False):
        known.add(StepLoad(8, share), us)
    return TokenBudget(KEYS, 64, known, max_tokens)


@pytest.mark.parametrize(
    ("buckets", "chunk", "shares"),
    [
        ((64, 128, 512), 512, (64, 128, 512)),
        ((256,), 256, (64, 128, 256)),  # of one graph any part may be idle
        ((), 200, (64, 128, 200)),
        ((8,), 8, (8,)),
        ((), 64, (64,)),
    ],
)
def test_shares_are_those_of_the_graphs_or_doubled(
    buckets: tuple[int, ...], chunk: int, shares: tuple[int, ...]
) -> None:
    assert shares_of(buckets, chunk) == shares


def test_without_decode_rows_a_step_takes_a_whole_chunk() -> None:
    assert budget().prompt_tokens(0, 1, [64]) == 64
    assert budget(max_tokens=100).prompt_tokens(0, 1, [64]) == 64
    assert budget(max_tokens=40).prompt_tokens(0, 1, [64]) == 40


def test_while_more_rows_have_prompts_than_decode_a_step_takes_a_whole_chunk() -> None:
    assert budget().prompt_tokens(5, 6, [64]) == 64
    assert budget().prompt_tokens(5, 5, [64]) == 16
    assert budget(max_tokens=40).prompt_tokens(5, 6, [64]) == 35
    assert budget(max_tokens=8).prompt_tokens(8, 9, [64]) == 16


def test_while_sixteen_chunks_are_not_enough_for_the_prompts_a_step_takes_a_whole_chunk() -> None:
    assert budget().prompt_tokens(5, 5, [16 * 64]) == 16
    assert budget().prompt_tokens(5, 5, [16 * 64 + 1]) == 64
    assert budget().prompt_tokens(5, 5, [600, 0, 424, 1, 5]) == 64
    assert budget(max_tokens=40).prompt_tokens(5, 1, [2000]) == 35


def test_while_more_than_two_chunks_wait_a_step_may_take_longer() -> None:
    made = budget(times=(140.0, 180.0, 245.0))
    assert made.prompt_tokens(5, 5, [2 * 64]) == 32
    assert made.prompt_tokens(5, 5, [64, 64, 1]) == 64
    assert budget(times=(140.0, 180.0, 255.0)).prompt_tokens(5, 5, [64, 64, 1]) == 32


def test_the_rule_is_that_of_the_design() -> None:
    text = Path(__file__).parents[2].joinpath("photon_ext", "README.md").read_text()
    rows = re.findall(r"^ *\| (?:\d+ to|up to|more than) (\d+)[^|]*\| ([^|]*)\|$", text, re.M)
    told = [
        (int(most), [float(us) for us in re.findall(r"[\d.]+(?= times)", takes)])
        for most, takes in rows
    ]
    assert told == [(2, [2.0, 2.5]), (16, [2.5]), (16, [])]
    of_rule = [(most, [*dict.fromkeys(takes or ())]) for most, takes in BACKLOGS]
    assert of_rule == [*told[:2], (math.inf, [])]


def test_beside_decode_rows_it_is_what_the_cost_table_allows_their_bucket() -> None:
    assert budget().prompt_tokens(5, 1, [64]) == 16
    assert budget(times=(120.0,)).prompt_tokens(5, 1, [64]) == 32
    assert budget(times=(120.0, 140.0)).prompt_tokens(5, 1, [64]) == 64
    assert budget(times=(120.0, 140.0)).prompt_tokens(9, 1, [64]) == 16  # of another bucket


def test_steps_with_adapters_and_with_objects_have_times_of_their_own() -> None:
    made = budget(times=(120.0, 140.0))
    plain, adapted, objects = StepFeatures.NONE, StepFeatures.LORA, StepFeatures.SPATIAL
    assert [made.prompt_tokens(5, 1, [64], each) for each in (plain, adapted, objects)] == [
        *(64, 16, 16)
    ]
    for share, us in ((0, 200.0), (16, 390.0), (32, 501.0)):
        made._costs._times.add(StepLoad(8, share, adapted), us)
    assert [made.prompt_tokens(5, 1, [64], each) for each in (plain, adapted)] == [64, 16]


def test_only_where_rows_may_ask_for_features_anybody_is_looked_at() -> None:
    rows = (
        prompt(1, 5),
        Row(2, 1, (2,), (1,), RowParams(), lora_slot=3),
        Row(3, 1, (3,), (1,), RowParams(object_values=2)),
    )
    assert budget().features(rows, ()) is StepFeatures.NONE
    keys = replace(KEYS, features=StepFeatures.LORA | StepFeatures.SPATIAL)
    made = TokenBudget(keys, 64, StepTimes(KEYS.prefill_buckets))
    each = [StepFeatures.NONE, StepFeatures.LORA, StepFeatures.SPATIAL]
    assert [made.features((row,)) for row in rows] == each
    assert made.features(rows[:1], rows[1:]) is StepFeatures.LORA | StepFeatures.SPATIAL


@pytest.mark.parametrize(("rows", "tokens"), [(2, 64), (6, 64), (7, 63), (8, 62)])
def test_the_cap_counts_decode_rows(rows: int, tokens: int) -> None:
    assert budget(max_tokens=70, times=(101.0, 102.0, 103.0)).prompt_tokens(rows, 1, [64]) == tokens


@pytest.mark.parametrize("max_tokens", [1, 8, 20])
def test_hazard_28_prefill_keeps_a_share_where_decode_alone_uses_up_the_budget(
    max_tokens: int,
) -> None:
    assert budget(max_tokens).prompt_tokens(8, 1, [64]) == 16
    assert budget(max_tokens, times=(5000.0,)).prompt_tokens(8, 1, [64]) == 16


# --- plans ----------------------------------------------------------------------------------------


def planned(*rows: Row, **options: object) -> StepPlan:
    running_set = RunningSet()
    for row in rows:
        running_set.add(row)
        if not row.wants_prefill:
            running_set.prompt_done(row)
    scheduler = Scheduler(Pager(PagePool(4), 4), 64, 64)
    planner = Planner(scheduler, running_set, 64, budget(**options))  # type: ignore[arg-type]
    plan = planner.plan(StepKind.MIXED)
    assert planner.plan(None).decode is plan.decode  # steady steps have the same tuple
    return plan


def prompt(index: int, tokens: int, cap: int = 4) -> Row:
    return Row(index, 1, (index,), tuple(range(tokens)), RowParams(cap))


def decoding(index: int, cap: int = 4) -> Row:
    row = prompt(index, 3, cap)
    row.launch_chunk(0, 3)
    return row


def test_nobody_is_planned_where_nothing_can_be_launched() -> None:
    assert planned() == StepPlan()


def test_decode_rows_ride_in_every_step() -> None:
    rows = decoding(1), decoding(2)
    assert planned(*rows) == StepPlan(rows, ())
    long = prompt(3, 200)
    assert planned(*rows, long) == StepPlan(rows, ((long, 16),))
    assert planned(*rows, long, times=(120.0, 150.0)) == StepPlan(rows, ((long, 64),))


def test_chunks_of_several_prompts_share_a_step_in_order_of_admission() -> None:
    rows, prompts = map(decoding, (1, 5, 6)), [prompt(2, 5), prompt(3, 9), prompt(4, 50)]
    assert planned(*rows, *prompts).chunks == tuple(zip(prompts, (5, 9, 2), strict=True))
    assert planned(*prompts).chunks == tuple(zip(prompts, (5, 9, 50), strict=True))


def test_hazard_9_no_row_whose_cap_is_covered_rides_in_a_mixed_step() -> None:
    covered, left, waiting = decoding(1, cap=1), decoding(2, cap=2), prompt(3, 3)
    assert planned(covered, left, waiting) == StepPlan((left,), ((waiting, 3),))
    assert planned(covered) == StepPlan()


def test_hazard_27_a_prompt_is_sampled_with_its_last_token() -> None:
    for tokens in (15, 16, 17, 33):
        long, rows = prompt(2, tokens), 0
        while long.wants_prefill:
            (chunk,) = planned(decoding(1), long).chunks
            long.launch_chunk(rows, chunk.num_tokens)
            rows += 1
            assert long.launched == (not long.wants_prefill)
        assert rows == -(-tokens // 16)


def test_hazard_28_an_empty_decode_batch_leaves_a_prefill_step() -> None:
    waiting = prompt(1, 70)
    assert planned(waiting) == StepPlan((), ((waiting, 64),))
