"""The planner: who gets a row next. Other orders are in test_policy.py."""

from photon_ext.runtime import StepPlan
from photon_ext.runtime.running_set import RunningSet
from photon_ext.scheduling import PagePool, Pager, Planner, Scheduler
from tests.scheduling.sequences import make_sequence

PAGE, ROWS, MAX_LEN, PAGES = 4, 8, 32, 6


def admitted(*prompts: int) -> list[int]:
    """Lengths of prompts, in the order in which they get pages; each answer has one token."""
    scheduler = Scheduler(Pager(PagePool(PAGES), PAGE, share=False), ROWS, MAX_LEN)
    for prompt in prompts:
        scheduler.add(make_sequence(prompt, 1))
    found = Planner(scheduler, RunningSet(), 16).admissions()
    lengths = [len(sequence.admission.prompt_ids) for sequence, _ in found]
    assert len(scheduler.waiting) == len(prompts) - len(lengths)
    return lengths


def test_first_come_first_served() -> None:
    assert admitted(9, 2, 5) == [9, 2, 5]


def test_nobody_overtakes_who_waits_for_pages() -> None:
    # 4 + 3 pages for 6: the third would fit
    assert admitted(16, 12, 1) == [16]


def test_nobody_is_planned_where_no_row_has_anything_to_launch() -> None:
    scheduler = Scheduler(Pager(PagePool(PAGES), PAGE, share=False), ROWS, MAX_LEN)
    assert Planner(scheduler, RunningSet(), 16).plan(None) == StepPlan()
