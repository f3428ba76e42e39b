"""How many prompt tokens measured times allow beside decode rows."""

from __future__ import annotations

import pytest

from photon_ext.scheduling.cost_table import RULE, CostTable, Slowdown
from photon_ext.scheduling.step_times import StepLoad, StepTimes

SHARES = (16, 32, 64, 128)
LONGER = Slowdown(2.5, sparing=2.5)


class Table:
    """A cost table, and the times that it reads."""

    def __init__(self, shares: tuple[int, ...] = SHARES) -> None:
        self.times = StepTimes(shares)
        self.costs = CostTable(self.times)

    def add(self, rows: int, tokens: int, us: float) -> None:
        """A step has taken `us`."""
        load = StepLoad(rows, tokens)
        self.times.add(load, us)
        self.costs.timed(load)

    def allowed(self, rows: int, slowdown: Slowdown = RULE) -> int:
        return self.costs.allowed(StepLoad(rows), slowdown)


def table(*times: tuple[int, int, float]) -> Table:
    costs = Table()
    for rows, tokens, us in times:
        costs.add(rows, tokens, us)
    return costs


def test_without_a_measurement_it_is_the_smallest_share() -> None:
    assert table().allowed(8) == 16
    assert table((8, 0, 100.0)).allowed(8) == 16


@pytest.mark.parametrize(
    ("us", "reached"),
    [
        (150.0, [16, 32, 64, 32, 32]),
        (160.0, [16, 32, 16, 16]),
        (125.0, [16, 32, 64, 128, 64]),
        (125.1, [16, 32, 64, 32, 32]),
        (112.5, [16, 32, 64, 128, 128]),
        (99.0, [16, 32, 64, 128, 128]),  # no faster than without prompts, but by chance
        (900.0, [16, 32, 16]),
    ],
)
def test_shares_double_as_measurements_allow(us: float, reached: list[int]) -> None:
    """The decode step takes 100 us, a mixed one may take 200, and prompt tokens cost in proportion:
    the first share that takes longer is tried once.
    """
    costs, seen = table((8, 0, 100.0)), []
    for _ in reached:
        seen.append(costs.allowed(8))
        costs.add(8, seen[-1], 100.0 + (us - 100.0) * seen[-1] / 16)
    assert seen == reached


def test_a_share_is_used_whose_steps_take_no_longer_than_is_allowed() -> None:
    costs = table((8, 0, 100.0), (8, 16, 160.0), (8, 32, 200.0), (8, 64, 300.0))
    assert costs.allowed(8) == 32
    costs = table((8, 0, 100.0), (8, 16, 120.0), (8, 32, 201.0))
    assert costs.allowed(8) == 16


@pytest.mark.parametrize(("rows", "best"), [(8, 64), (30, 32), (64, 64), (128, 128)])
def test_steps_that_follow_the_table_take_twice_the_decode_step_at_most(
    rows: int, best: int
) -> None:
    """A device whose time is the larger of a fixed one and one by tokens, as that of a GPU is: what
    the next share costs shows when it is tried, and then it is left alone for long.
    """

    def us(tokens: int) -> float:
        return max(100.0, 2.2 * (rows + tokens))

    costs = table((rows, 0, us(0)))
    shares = []
    for _ in range(200):
        shares.append(costs.allowed(rows))
        costs.add(rows, shares[-1], us(shares[-1]))
    slow = [share for share in shares if us(share) > 2 * us(0)]
    assert len(slow) <= len(shares) / 20
    assert max(shares, key=shares.count) == best


def test_buckets_of_rows_have_nothing_to_do_with_each_other() -> None:
    costs = table((8, 0, 100.0), (8, 16, 100.0))
    assert costs.allowed(8) == 32
    assert costs.allowed(16) == 16


def test_times_are_smoothed() -> None:
    costs = table((8, 0, 100.0), (8, 16, 110.0), (8, 32, 190.0), (8, 64, 300.0))
    costs.add(8, 0, 60.0)  # 100 - 40 / 8 = 95, and twice that is 190
    assert costs.allowed(8) == 32
    costs.add(8, 0, 60.0)
    assert costs.allowed(8) == 16
    costs.add(8, 32, 100.0)  # 190 - 90 / 8 = 179
    assert costs.allowed(8) == 32


def test_a_slower_step_counts_in_full() -> None:
    costs = table((8, 0, 100.0), (8, 16, 110.0), (8, 32, 120.0))
    costs.add(8, 32, 201.0)
    assert costs.allowed(8) == 16


def test_a_share_that_was_forbidden_is_tried_again() -> None:
    """One bad moment, or a long context that has gone, does not forbid a share for ever."""
    costs = table((8, 0, 100.0), (8, 16, 110.0), (8, 32, 900.0))
    steps = 0
    while costs.allowed(8) == 16:
        costs.add(8, 16, 110.0)
        steps += 1
    assert 100 < steps < 400
    costs.add(8, 32, 130.0)
    assert costs.allowed(8) == 64


def test_a_share_is_tried_again_where_longer_steps_are_allowed() -> None:
    """Of 250 us it takes 240, and once took 300: which is not known for ever, although it is above
    what is allowed as a rule.
    """
    costs = table((8, 0, 100.0), (8, 16, 130.0), (8, 32, 160.0), (8, 64, 240.0), (8, 64, 300.0))
    assert costs.allowed(8, LONGER) == 32
    for _ in range(400):
        costs.add(8, share := costs.allowed(8, LONGER), {32: 160.0, 64: 240.0, 128: 400.0}[share])
    assert costs.allowed(8, LONGER) == 64
    assert costs.allowed(8) == 32


def test_one_slow_step_with_the_smallest_share_does_not_count_for_ever() -> None:
    """A step of 16 tokens took ten times as long: larger shares, which are used then, tell that it
    takes no longer than they do.
    """
    us = {16: 130.0, 32: 160.0, 64: 220.0, 128: 340.0}
    costs = table((8, 0, 100.0), (8, 16, 130.0), (8, 16, 1300.0))
    shares = []
    for _ in range(400):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], us[shares[-1]])
    assert max(shares, key=shares.count) == 32
    assert shares.count(128) < 5


def test_where_no_decode_step_runs_two_shares_tell_what_it_would_take() -> None:
    """Prompts without end: 100 us and 2 for each prompt token."""
    costs = Table()
    seen = []
    for _ in range(4):
        seen.append(costs.allowed(8))
        costs.add(8, seen[-1], 100.0 + 2.0 * seen[-1])
    assert seen == [16, 32, 64, 32], "228 us, where the rows alone would take 100"
    costs.add(8, 0, 60.0)  # then one runs, and it is faster than that
    assert costs.allowed(8) == 32, "164 us of 165"


def test_one_share_alone_is_always_allowed() -> None:
    costs = Table((8,))
    costs.add(4, 8, 900.0)
    costs.add(4, 0, 1.0)
    assert costs.allowed(4) == 8


@pytest.mark.parametrize("least", [170.0, 199.0, 201.0, 230.0])
def test_what_hardly_takes_longer_is_allowed_on_either_side_of_twice_the_decode_step(
    least: float,
) -> None:
    """Where 16 tokens take 199 us of 200 allowed, 64 that take 230 are no worse: else prompts would
    come in small pieces for no gain.
    """
    costs, shares = table((8, 0, 100.0)), []
    us = {16: least, 32: 1.05 * least, 64: 1.15 * least, 128: 1.6 * least}
    for _ in range(200):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], us[shares[-1]])
    assert max(shares, key=shares.count) == 64
    assert shares.count(128) < 5


def test_a_share_that_spares_the_rows_time_may_take_longer() -> None:
    """Mixing takes 50 us and a prompt token one: 64 tokens take 214 us of 200, but 1.8 beyond the
    rows for each where 32 take 2.6. 128 would take 278, which is too much for any.
    """
    costs, shares = table((8, 0, 100.0)), []
    for _ in range(400):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], 150.0 + shares[-1])
    assert max(shares, key=shares.count) == 64
    assert shares.count(128) < 5


@pytest.mark.parametrize(("larger", "best"), [(218.0, 64), (219.0, 32)])
def test_what_spares_less_than_a_tenth_is_not_worth_a_longer_step(larger: float, best: int) -> None:
    """32 tokens take 66 us beyond the rows, and 64 may take twice that, less a tenth."""
    costs = table((8, 0, 100.0), (8, 16, 150.0), (8, 32, 166.0), (8, 64, larger), (8, 128, 900.0))
    assert costs.allowed(8) == best


@pytest.mark.parametrize(("larger", "best"), [(250.0, 64), (251.0, 32)])
def test_more_than_two_and_a_half_decode_steps_are_too_long_whatever_is_spared(
    larger: float, best: int
) -> None:
    costs = table((8, 0, 100.0), (8, 16, 150.0), (8, 32, 190.0), (8, 64, larger), (8, 128, 900.0))
    assert costs.allowed(8) == best


@pytest.mark.parametrize("first", [145.0, 155.0])
def test_a_share_that_spares_time_is_found_again_after_a_slow_step(first: float) -> None:
    """64 tokens take 245 us of at most 250, and once took 300."""
    us = {16: first, 32: 190.0, 64: 245.0, 128: 400.0}
    costs = table((8, 0, 100.0), *((8, tokens, us[tokens]) for tokens in (16, 32, 64)))
    costs.add(8, 64, 300.0)
    assert costs.allowed(8) == 32
    shares = []
    for _ in range(1000):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], us[shares[-1]])
    assert shares.count(32) < 600
    assert max(shares[600:], key=shares.count) == 64
    assert shares.count(128) < 10


def test_where_mixing_itself_is_dear_shares_are_allowed_that_take_hardly_longer() -> None:
    """A GPU whose mixed steps run other kernels: 300 us where the rows alone take 100, and 0.5 for
    each prompt token.
    """
    costs, shares = table((8, 0, 100.0)), []
    for _ in range(200):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], 300.0 + 0.5 * shares[-1])
    assert shares[:4] == [16, 32, 64, 128]
    assert shares[-1] == 128
    dear = [300.0 + 2.0 * share for share in SHARES]
    costs, shares = table((8, 0, 100.0)), []
    for _ in range(400):
        shares.append(costs.allowed(8))
        costs.add(8, shares[-1], dear[SHARES.index(shares[-1])])
    assert max(shares, key=shares.count) == 32, "396 us of at most 415; 64 takes 428"
    assert shares.count(64) < 20
