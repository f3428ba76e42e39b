"""Plans of the user's own: any rows with a token to launch, beside chunks of any prompts, and the
tokens are those of steps that nobody planned; what a step cannot be is refused before anything of
it has begun.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from photon_ext.errors import PipelineError
from photon_ext.row_params import RowParams
from photon_ext.runtime import Pipeline, Runtime
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import (
    Chunk,
    StepKey,
    StepKind,
    StepPlan,
)
from photon_ext.testing import (
    Chooser,
    Driver,
    Random,
    Request,
    SimRuntime,
    check_invariants,
    explore,
)
from tests.conftest import EXAMPLES
from tests.runtime.simulated import MODEL, follow, pipeline, random_plan, requests
from tests.runtime.test_failure import VOCAB, Forward

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
Planner = Callable[[Pipeline], StepPlan]


class Planned(Driver):
    """Drives a pipeline by plans of its own; where nothing is planned, by the default one."""

    def __init__(self, runtime: SimRuntime | Runtime, planner: Planner, **options: object) -> None:
        super().__init__(runtime, **options)  # type: ignore[arg-type]
        self._planner = planner
        self.kinds: set[StepKind] = set()

    def tick(self) -> None:
        self.admit()
        pipe = self.pipeline
        pipe.finalize(self.fill)
        if pipe.can_launch:
            plan = self._planner(pipe)
            step = pipe.launch(plan if plan.decode or plan.chunks else None)
            assert (
                step is None
                or step.rows == (*plan.decode, *(c.row for c in plan.chunks))
                or plan == StepPlan()
            )
            self.kinds |= {step.key.kind} if step is not None else set()
            pipe.finalize(self.fill)
            check_invariants(pipe)
            if step is not None and pipe.can_launch:
                return
        for event in pipe.commit():
            self.take(event)
        check_invariants(pipe)


RUNTIMES: dict[str, Callable[[int, int], tuple[SimRuntime | Runtime, bool]]] = {
    "simulated": lambda depth, seed: (
        SimRuntime(3, 32, depth, page_size=4, chooser=Random(seed)),
        True,
    ),
    "simulated-eager": lambda depth, seed: (
        SimRuntime(3, 32, depth, page_size=4, chooser=Random(seed)),
        False,
    ),
    "real-eager": lambda depth, seed: (
        Runtime(max_rows=3, max_len=32, depth=depth, device="cpu", page_size=4),
        False,
    ),
}


@DEPTHS
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", RUNTIMES)
def test_i8_tokens_do_not_depend_on_the_plan(kind: str, seed: int, depth: int) -> None:
    """Stops, caps, noise and masks; rows and pages are reused."""
    asked, rng = requests(9, seed), random.Random(seed)
    runtime, graph = RUNTIMES[kind](depth, seed)
    driver = Planned(
        runtime,
        lambda pipe: random_plan(pipe, rng, 6),
        pages=24,
        chunk=6,
        graph=graph,
        prefill_buckets=(3,),
    )
    assert driver.run(*asked) == [MODEL.generate(request) for request in asked]
    assert driver.kinds == set(StepKind)
    assert sorted(driver.free_pages) == list(range(24))
    if isinstance(runtime, SimRuntime):
        assert runtime.stats.slow == []


@DEPTHS
@pytest.mark.parametrize("graph", [True, False])
def test_mixed_steps_on_the_host_give_the_tokens_of_separate_ones(depth: int, graph: bool) -> None:
    """No graph has their shape: they run eagerly among replayed ones."""
    asked = [([1, 2, 3, 4, 5], 6), ([9], 7), ([4, 4], 5), ([0, 8, 2], 4)]

    def served(planner: Planner | None) -> tuple[list[list[int | None]], set[StepKind]]:
        runtime = Runtime(max_rows=4, max_len=32, depth=depth, device="cpu")
        pipe = Pipeline(runtime, Forward(), vocab_size=VOCAB, chunk=4, buckets=(1, 2), graph=graph)
        rows = [pipe.admit(prompt, RowParams(cap)) for prompt, cap in asked]
        tokens: dict[Row, list[int | None]] = {row: [] for row in rows}
        kinds = set()
        while pipe.busy:
            plan = planner(pipe) if planner else None
            step = pipe.launch(plan if plan is None or plan.decode or plan.chunks else None)
            kinds |= {step.key.kind} if step is not None else set()
            if step is None or not pipe.can_launch:
                for event in pipe.commit():
                    tokens[event.row] += event.tokens
        return [tokens[row] for row in rows], kinds

    rng = random.Random(depth)
    separate, kinds = served(None)
    assert kinds == {StepKind.PREFILL, StepKind.DECODE}
    expected = [[(prompt[-1] + 1 + i) % VOCAB for i in range(cap)] for prompt, cap in asked]
    assert separate == expected
    for _ in range(10):
        tokens, more = served(lambda pipe: random_plan(pipe, rng, 4))
        assert tokens == expected
        kinds |= more
    assert kinds == set(StepKind)


def test_a_mixed_step_is_right_under_every_interleaving() -> None:
    asked = Request((1, 2), 3), Request((3, 4, 5), 2, allowed=follow)
    expected = [MODEL.generate(request) for request in asked]

    def together(pipe: Pipeline) -> StepPlan:
        chunks = tuple(Chunk(row, 1) for row in pipe.running_set.prefill)
        return StepPlan(pipe.running_set.decode, chunks)

    def scenario(chooser: Chooser) -> None:
        driver = Planned(SimRuntime(2, 12, chooser=chooser), together)
        assert driver.run(*asked) == expected
        assert StepKind.MIXED in driver.kinds

    found = explore(scenario, 300 * EXAMPLES)
    assert found.interleavings > 100


def test_the_key_and_the_words_of_a_mixed_step() -> None:
    pipe = pipeline(SimRuntime(4, depth=1), chunk=8)
    rows = [pipe.admit(prompt, RowParams(9)) for prompt in ((1, 2), (3,), (4, 5, 6, 7), (8, 9))]
    pipe.launch(StepPlan((), (Chunk(rows[0], 2), Chunk(rows[1], 1))))
    pipe.commit()
    step = pipe.launch(StepPlan((rows[1], rows[0]), (Chunk(rows[3], 2), Chunk(rows[2], 3))))
    assert step is not None
    assert step.key == StepKey(2, 5, 2, False)
    assert (step.key.kind, step.key.num_tokens, step.key.segments) == (StepKind.MIXED, 7, 4)
    assert step.rows == (rows[1], rows[0], rows[3], rows[2])
    assert [(c.position, c.num_tokens, c.sample) for c in step.chunks] == [
        (0, 2, True),
        (0, 3, False),
    ]
    assert [event.row for event in pipe.commit()] == [rows[1], rows[0], rows[3]]
    assert pipe.running_set.decode == (rows[0], rows[1], rows[3])


def test_what_is_no_row_is_refused_by_name() -> None:
    pipe = pipeline(SimRuntime())
    with pytest.raises(PipelineError, match="None is no row; give one that admit"):
        pipe.abort(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [StepPlan(), StepPlan((), ())])
def test_an_empty_plan_launches_nothing(plan: StepPlan) -> None:
    pipe = pipeline(SimRuntime())
    pipe.admit((1,), RowParams(2))
    assert pipe.launch(plan) is None
    assert (pipe.inflight, pipe.stats.steps) == (0, 0)
    assert pipe.launch() is not None


# --- bad plans ------------------------------------------------------------------------------------


class Rows:
    """A pipeline with a row in every state, one step in flight."""

    def __init__(self) -> None:
        self.pipe = pipeline(SimRuntime(7, depth=2), chunk=6)
        self.decoding, self.other = self.admit((1, 2), 9), self.admit((3,), 9)
        self.capped, self.ended = self.admit((4,), 1), self.admit((5,), 9)
        self.pipe.tick()
        self.pipe.commit()
        self.draining = self.admit((6,), 9)
        self.prefilling, self.waiting = self.admit((7, 8, 9), 9), self.admit((1,) * 9, 9)
        self.pipe.launch(
            StepPlan(
                (self.decoding, self.ended), (Chunk(self.draining, 1), Chunk(self.prefilling, 1))
            )
        )
        self.pipe.abort(self.ended)
        self.pipe.drain(self.draining)
        self.foreign = pipeline(SimRuntime()).admit((1, 2), RowParams(3))

    def admit(self, prompt: tuple[int, ...], cap: int) -> Row:
        return self.pipe.admit(prompt, RowParams(cap))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda r: 5, "the plan is 5; give a StepPlan, or None"),
        (lambda r: [r.other], r"the plan is \[Row.*; give a StepPlan"),
        (lambda r: StepPlan((r.prefilling,)), r"Row\(.*prefilled 1/3.* has no token to decode"),
        (lambda r: StepPlan((r.decoding, r.waiting)), r"Row\(.*0/9.* has no token to decode"),
        (lambda r: StepPlan((r.capped,)), r"Row\(.*released.*1/1.* has no token to decode"),
        (lambda r: StepPlan((r.ended,)), r"Row\(.*finished.* has no token to decode"),
        (lambda r: StepPlan((r.draining,)), r"Row\(.*draining.* has no token to decode"),
        (lambda r: StepPlan((r.other, r.decoding, r.other)), "a plan names a row twice"),
        (lambda r: StepPlan((r.other,) * 8), r"a plan has 8 decode rows; a step takes 7"),
        (lambda r: StepPlan((r.foreign,)), r"Row\(.*0/2.*, which another pipeline admitted"),
        (lambda r: StepPlan([r.other]), r"decode rows are \[Row\(.*\]; give a tuple of rows"),
        (lambda r: StepPlan((), (Chunk(r.foreign, 1),)), "which another pipeline admitted"),
        (
            lambda r: StepPlan((), (Chunk(r.prefilling, 0),)),
            r"a chunk of 0 tokens of Row\(",
        ),
        (lambda r: StepPlan((), (Chunk(r.prefilling, -1),)), "a chunk of -1 tokens"),
        (
            lambda r: StepPlan((), (Chunk(r.prefilling, 3),)),
            "of 3 tokens .* 2 of its prompt",
        ),
        (lambda r: StepPlan((), (Chunk(r.prefilling, 1.5),)), "a chunk of 1.5 tokens"),
        (lambda r: StepPlan((), (Chunk(r.prefilling, True),)), "a chunk of True tokens"),
        (lambda r: StepPlan((), (Chunk(r.decoding, 1),)), "of 1 tokens .* 0 of its prompt"),
        (lambda r: StepPlan((), (Chunk(r.ended, 1),)), "a chunk of 1 tokens .*finished"),
        (
            lambda r: StepPlan((r.other,), (Chunk(r.waiting, 1), Chunk(r.waiting, 1))),
            "two chunks of one row; give one for both",
        ),
        (lambda r: StepPlan((), (Chunk(r.waiting, 7),)), "7 prompt tokens; a step takes 6"),
        (
            lambda r: StepPlan((r.other,), (Chunk(r.waiting, 5), Chunk(r.prefilling, 2))),
            "7 prompt tokens; a step takes 6",
        ),
    ],
)
def test_a_bad_plan_is_refused_by_name_and_changes_nothing(
    plan: Callable[[Rows], StepPlan], message: str
) -> None:
    rows = Rows()
    pipe = rows.pipe

    def state() -> object:
        counts = [(row.prefilled, row.launched, row.last_step, row.epoch) for row in pipe.rows]
        return (
            counts,
            pipe.running_set.decode,
            pipe.running_set.prefill,
            pipe.inflight,
            pipe.stats.steps,
        )

    before, pending = state(), dict(pipe._runtime.table._pending)
    with pytest.raises(PipelineError, match=message):
        pipe.launch(plan(rows))
    assert state() == before
    assert pipe._runtime.table._pending == pending
    check_invariants(pipe)
    tokens: dict[Row, list[int | None]] = {}
    while pipe.busy:
        for event in pipe.tick():
            tokens.setdefault(event.row, []).extend(event.tokens)
    for row, left in ((rows.decoding, 8), (rows.other, 8), (rows.prefilling, 9), (rows.waiting, 9)):
        assert tuple(tokens[row]) == MODEL.generate(Request(row.prompt_ids, 9))[-left:]
    assert tuple(tokens[rows.draining]) == MODEL.generate(Request((6,), 1))
    assert set(tokens) == {
        rows.decoding,
        rows.other,
        rows.prefilling,
        rows.waiting,
        rows.draining,
    }
