"""Pages that rows get while they run, and prefixes that they find in theirs at admission."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from photon_ext.errors import PipelineError, RequestError
from photon_ext.layout import NO_PAGE
from photon_ext.row_params import RowParams
from photon_ext.runtime import Pipeline, Runtime
from photon_ext.runtime.default_plan import first_come_first_served
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import PageAppend, StepPlan
from photon_ext.testing import Random, Request, SimRuntime, ToyForward
from tests.runtime.simulated import MODEL

PAGE, VOCAB = 4, 32
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
RUNTIMES: dict[str, Callable[[int], SimRuntime | Runtime]] = {
    "simulated": lambda depth: SimRuntime(3, 32, depth, PAGE, chooser=Random(3), keeps_pages=True),
    "real": lambda depth: Runtime(
        max_rows=3, max_len=32, depth=depth, device="cpu", page_size=PAGE
    ),
}
KINDS = pytest.mark.parametrize("kind", RUNTIMES)


def pipeline_on(runtime: SimRuntime | Runtime) -> Pipeline:
    forward = ToyForward(runtime, VOCAB, 64)
    return Pipeline(runtime, forward, vocab_size=VOCAB, chunk=6, prefill_buckets=(), graph=False)


class Pages:
    """Appends pages, so many at a time, to rows whose next token has none; each has a new page."""

    def __init__(self, pipe: Pipeline, at_a_time: Callable[[], int]) -> None:
        self._pipe = pipe
        self._at_a_time = at_a_time
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))

    def plan(self) -> StepPlan:
        appends = []
        for row in self._pipe.running_set.decode:
            if row.next_position >= row.capacity:
                left = 8 - len(row.pages)
                appends.append(PageAppend(row, self.take(min(self._at_a_time(), left))))
        return default_plan(self._pipe)()._replace(appends=tuple(appends))


def run(pipe: Pipeline, rows: dict[Row, list[int]], plan: Callable[[], StepPlan]) -> None:
    while pipe.busy:
        step = pipe.launch(plan()) if pipe.can_launch else None
        if step is None or not pipe.can_launch:
            for event in pipe.commit():
                assert event.error is None
                rows[event.row] += event.tokens


@KINDS
@DEPTHS
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_when_pages_come(kind: str, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    pipe = pipeline_on(RUNTIMES[kind](depth))
    pages = Pages(pipe, lambda: rng.randint(1, 3))
    asked = [
        Request(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))), rng.randint(1, 20))
        for _ in range(3)
    ]
    rows: dict[Row, list[int]] = {}
    for one in asked:
        first = pages.take(-(-len(one.prompt_ids) // PAGE))
        rows[pipe.admit(one.prompt_ids, one.params, first, grows=True)] = []
    run(pipe, rows, pages.plan)
    assert [tuple(tokens) for tokens in rows.values()] == [MODEL.generate(one) for one in asked]


@KINDS
@DEPTHS
def test_a_prefix_in_the_pages_is_not_computed_again(kind: str, depth: int) -> None:
    prompt = tuple(range(1, 12))
    pipe = pipeline_on(RUNTIMES[kind](depth))
    first = pipe.admit(prompt, RowParams(3), (0, 1, 2, 3))
    rows: dict[Row, list[int]] = {first: []}
    run(pipe, rows, default_plan(pipe))
    steps = pipe.stats.prefill_steps
    for cached, pages in ((8, (0, 1, 10, 11)), (4, (0, 12, 13, 14))):
        rows[pipe.admit((*prompt[:cached], 30, 31), RowParams(5), pages, cached=cached)] = []
    run(pipe, rows, default_plan(pipe))
    assert pipe.stats.prefill_steps == steps + 1, "two tokens of each"
    asked = [Request((*prompt[:cached], 30, 31), 5) for cached in (8, 4)]
    expected = [MODEL.generate(one) for one in (Request(prompt, 3), *asked)]
    assert [tuple(tokens) for tokens in rows.values()] == expected


def default_plan(pipe: Pipeline) -> Callable[[], StepPlan]:
    running_set = pipe.running_set
    return lambda: first_come_first_served(
        running_set.decode, running_set.prefill, pipe.last_kind, 6
    )


def test_a_row_without_a_page_for_its_token_is_refused_and_others_go_on() -> None:
    pipe = pipeline_on(SimRuntime(3, 32, 1, PAGE))
    row = pipe.admit((1, 2, 3), RowParams(9), (0,), grows=True)
    other = pipe.admit((5,), RowParams(9), (7, 8, 9))
    pipe.launch(default_plan(pipe)())
    pipe.commit()
    pipe.launch(StepPlan((row, other)))
    pipe.commit()
    with pytest.raises(PipelineError, match=r"has no page for position 4; append pages to it, or"):
        pipe.launch(StepPlan((row, other)))
    assert pipe.launch(StepPlan((other,))) is not None
    pipe.commit()
    assert pipe.launch(StepPlan((row, other), appends=(PageAppend(row, (1, 2)),))) is not None
    assert (row.pages, row.capacity) == ((0, 1, 2), 12)


def test_pages_that_come_before_the_first_launch_or_without_one_are_kept() -> None:
    pipe = pipeline_on(SimRuntime(3, 32, 1, PAGE))
    row = pipe.admit((1, 2, 3), RowParams(9), (0,), grows=True)
    assert pipe.launch(StepPlan(appends=(PageAppend(row, (4,)),))) is None
    assert pipe.launch(StepPlan(appends=(PageAppend(row, (6,)),))) is None
    rows: dict[Row, list[int]] = {row: []}
    run(pipe, rows, default_plan(pipe))
    assert tuple(rows[row]) == MODEL.generate(Request((1, 2, 3), 9))


@KINDS
@DEPTHS
def test_pages_that_no_launch_took_are_gone_with_their_row(kind: str, depth: int) -> None:
    runtime = RUNTIMES[kind](depth)
    pipe = pipeline_on(runtime)
    rows = [pipe.admit((1, 2, 3), RowParams(9), (page,), grows=True) for page in range(3)]
    pipe.launch(default_plan(pipe)())
    pipe.commit()
    pipe.launch(StepPlan(appends=(PageAppend(rows[0], (4, 5)),)))
    for row in rows[:2]:
        pipe.abort(row)
    for page in (6, 7):
        pipe.admit((1, 2, 3), RowParams(2), (page,), grows=True)
    pipe.launch(default_plan(pipe)())
    pipe.commit()
    table = (runtime.tables if isinstance(runtime, Runtime) else runtime.state.tables).page_table
    assert [table[row].tolist() for row in (1, 2)] == [[page, *[NO_PAGE] * 7] for page in (6, 7)]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ((0,), "names a page twice"),
        ((-1,), "pages holds -1"),
        (tuple(range(20, 28)), "8 pages given to a row of 1; it holds 8 at most"),
    ],
)
def test_pages_that_cannot_be_appended_are_refused(pages: tuple[int, ...], message: str) -> None:
    pipe = pipeline_on(SimRuntime(3, 32, 1, PAGE))
    row = pipe.admit((1, 2, 3), RowParams(9), (0,), grows=True)
    with pytest.raises(RequestError, match=message):
        pipe.launch(StepPlan(appends=(PageAppend(row, pages),)))
    assert row.pages == (0,)


def test_pages_for_a_row_that_has_ended_are_refused() -> None:
    pipe = pipeline_on(SimRuntime(3, 32, 1, PAGE))
    row = pipe.admit((1, 2, 3), RowParams(9), (0,), grows=True)
    pipe.abort(row)
    with pytest.raises(PipelineError, match="which does not run here"):
        pipe.launch(StepPlan(appends=(PageAppend(row, (1,)),)))


@pytest.mark.parametrize("cached", [-1, 3, 99])
def test_a_cached_prefix_leaves_at_least_one_token(cached: int) -> None:
    pipe = pipeline_on(SimRuntime(3, 32, 1, PAGE))
    with pytest.raises(RequestError, match=rf"cached is {cached} of a prompt of 3 tokens; from 0"):
        pipe.admit((1, 2, 3), RowParams(2), (0,), cached=cached)
    assert not pipe.rows
