"""Hypothesis drives the pipeline call by call: admit, launch, finalize, commit, abort and drain in
any order, with stops anywhere, by the default plan and by plans of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from photon_ext.errors import PipelineError
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Chunk, FinishReason, Step, StepPlan
from photon_ext.testing import (
    Driver,
    Outcome,
    Random,
    Request,
    SimRuntime,
    ToyModel,
    check_invariants,
)
from photon_ext.testing.row_table import SimRowTable
from tests.conftest import EXAMPLES
from tests.runtime.simulated import random_plan

VOCAB = 32
PAGES = 12
MODEL = ToyModel(VOCAB)


def follow(tokens: tuple[int, ...]) -> set[int]:
    """Depends on every token committed so far; allows nothing after 31 of them."""
    return {(sum(tokens) + step) % VOCAB for step in range(len(tokens), 31, 5)}


REQUESTS = st.builds(
    Request,
    prompt_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    max_new_tokens=st.integers(1, 8),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    frequency_penalty=st.sampled_from([0.0, 0.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 3.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9, width=16), max_size=2),
    allowed=st.sampled_from([None, None, follow]),
)


def subsets(rows: Sequence[Row]) -> st.SearchStrategy[tuple[Row, ...]]:
    """Some of the rows, in any order; most often all of them."""
    counts = st.one_of(st.just(len(rows)), st.integers(0, len(rows)))
    return st.tuples(st.permutations(rows), counts).map(lambda drawn: tuple(drawn[0][: drawn[1]]))


class PipelineMachine(RuleBasedStateMachine):
    """A paged device whose pages and rows are both too few, so that requests wait and rows and
    pages are reused.
    """

    @initialize(
        depth=st.sampled_from([1, 2]),
        rows=st.integers(1, 3),
        chunk=st.sampled_from([1, 3, 8]),
        seed=st.integers(0, 999),
        planned=st.booleans(),
        mixed=st.booleans(),
        requests=st.lists(REQUESTS, max_size=4),
    )
    def start(
        self,
        depth: int,
        rows: int,
        chunk: int,
        seed: int,
        planned: bool,
        mixed: bool,
        requests: list[Request],
    ) -> None:
        self.chunk = chunk
        self.last_decode: tuple[Row, ...] = ()
        self.drained: dict[Outcome, int] = {}
        self.runtime = SimRuntime(
            rows,
            16,
            depth,
            page_size=2,
            chooser=Random(seed),
            max_biases=2,
            penalty_vocab=VOCAB,
        )
        self.driver = Driver(
            self.runtime, pages=PAGES, chunk=chunk, prefill_buckets=(2, 8), mixed=mixed
        )
        self.pipe = self.driver.pipeline
        if planned:
            self.plan_at_random(random.Random(seed))
        self.submit(requests)

    def plan_at_random(self, rng: random.Random) -> None:
        """From now on, what nobody plans is planned at random, also by a turn of the loop."""
        launch = self.pipe.launch

        def planned(plan: StepPlan | None = None) -> Step | None:
            return launch(random_plan(self.pipe, rng, self.chunk) if plan is None else plan)

        self.pipe.launch = planned  # type: ignore[method-assign]

    @property
    def waits_for_masks(self) -> bool:
        return bool(self.pipe._inflight) and not self.pipe._inflight[-1].finalized

    @property
    def launches(self) -> bool:
        return self.pipe.can_launch and not self.waits_for_masks

    def make_room(self) -> bool:
        """Sends the masks that a launch would wait for; whether rows are left that can ride."""
        if self.waits_for_masks and self.pipe.inflight > 1:
            self.commit()
        self.pipe.finalize(self.driver.fill)
        if not self.pipe.can_launch:
            self.commit()
        return bool(self.pipe.running_set.decode or self.pipe.running_set.prefill)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.driver.submit(request)
        self.driver.admit()

    @rule()
    def launch(self) -> None:
        full = self.pipe.inflight == self.runtime.depth
        if self.waits_for_masks and not full:
            with pytest.raises(PipelineError, match="I11"):
                self.pipe.launch()
            return
        before = self.pipe.inflight
        step = self.pipe.launch()
        assert self.pipe.inflight == before + (step is not None)
        assert not (full and step)

    @precondition(lambda self: self.pipe.running_set.decode or self.pipe.running_set.prefill)
    @rule(data=st.data())
    def launch_a_plan(self, data: st.DataObject) -> None:
        """Any rows with a token to launch, in any order, and chunks of any prompts; the tuple of
        the plan before is used again where it can be.
        """
        if not self.make_room():
            return
        ready = [row for row in self.pipe.rows if row.wants_decode]
        prompts = [row for row in self.pipe.rows if row.wants_prefill]
        if self.last_decode and all(row.wants_decode for row in self.last_decode):
            choices = st.one_of(st.just(self.last_decode), subsets(ready))
        else:
            choices = subsets(ready)
        self.last_decode = data.draw(choices)
        chunks, budget = [], self.chunk
        for row in data.draw(subsets(prompts)):
            most = min(budget, len(row.prompt_ids) - row.prefilled)
            if most:
                chunks.append(Chunk(row, data.draw(st.integers(1, most))))
                budget -= chunks[-1].num_tokens
        counts = {row: (row.prefilled, row.launched) for row in self.pipe.rows}
        step = self.pipe.launch(StepPlan(self.last_decode, tuple(chunks)))
        assert (step is None) == (not self.last_decode and not chunks)
        for row in self.last_decode:
            assert row.launched == counts.pop(row)[1] + 1
        for row, tokens in chunks:
            assert row.prefilled == counts.pop(row)[0] + tokens
        for row, count in counts.items():
            assert (row.prefilled, row.launched) == count

    @precondition(lambda self: self.launches and self.driver.outcomes)
    @rule(data=st.data())
    def launch_a_bad_plan(self, data: st.DataObject) -> None:
        rows = [outcome.row for outcome in self.driver.outcomes if outcome.row is not None]
        idle = [row for row in rows if not row.wants_decode]
        bad = [StepPlan((row,)) for row in idle]
        bad += [StepPlan((), (Chunk(row, 1),)) for row in rows if not row.wants_prefill]
        bad += [StepPlan((row, row)) for row in rows if row.wants_decode]
        if bad:
            inflight = self.pipe.inflight
            with pytest.raises(PipelineError, match=r"a plan|out of the plan"):
                self.pipe.launch(data.draw(st.sampled_from(bad)))
            assert self.pipe.inflight == inflight

    @rule()
    def finalize(self) -> None:
        waited = self.waits_for_masks
        self.pipe.finalize(self.driver.fill)
        assert self.waits_for_masks == (waited and self.pipe.inflight > 1)

    @precondition(lambda self: self.pipe.inflight > 0)
    @rule()
    def commit(self) -> None:
        if not self.pipe._inflight[0].finalized:
            with pytest.raises(PipelineError, match=r"call finalize\(\) before commit"):
                self.pipe.commit()
            return
        for event in self.pipe.commit():
            self.driver.take(event)
        self.driver.admit()

    @rule()
    def tick(self) -> None:
        if self.waits_for_masks and self.pipe.inflight > 1:
            self.commit()
        self.pipe.finalize(self.driver.fill)
        self.driver.tick()

    @precondition(lambda self: self.driver.outcomes)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [outcome for outcome in self.driver.outcomes if outcome.finish is None]
        outcome = data.draw(st.sampled_from(live or self.driver.outcomes))
        ended = outcome.finish
        self.driver.cancel(outcome)
        assert outcome.finish is (ended or FinishReason.CANCELLED)
        if ended is None:
            self.drained.pop(outcome, None)
        self.driver.cancel(outcome)
        self.driver.admit()

    @precondition(lambda self: self.pipe.rows)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """What is in flight will be delivered, and nothing else."""
        running = [row for row in self.pipe.rows if row.running]
        row = data.draw(st.sampled_from(running or self.pipe.rows))
        outcome = self.driver._live[row.index, row.generation]
        sampled = row.launched
        assert self.pipe.drain(row) == bool(running)
        if running:
            self.drained[outcome] = sampled
        self.driver.admit()

    @invariant()
    def a_drained_row_has_told_what_was_in_flight_by_its_release(self) -> None:
        """Nobody says that it was the end; the test notes it."""
        for outcome, sampled in list(self.drained.items()):
            if outcome.released:
                del self.drained[outcome]
                assert tuple(outcome.tokens) == MODEL.generate(outcome.request)[:sampled]
                if outcome.finish is None:
                    outcome.finish = FinishReason.CANCELLED
                    self.driver._forget_ended(outcome)

    @invariant()
    def a_row_counts_the_tokens_that_were_told(self) -> None:
        for row in self.pipe.rows:
            if row.delivers:
                told = self.driver._live[row.index, row.generation].tokens
                assert row.committed == len(told) <= row.launched

    @invariant()
    def the_pipeline_holds(self) -> None:
        check_invariants(self.pipe)

    @invariant()
    def i9_pages_are_free_or_held(self) -> None:
        assert isinstance(self.runtime.table, SimRowTable)
        held = [page for pages in self.runtime.table.held_pages.values() for page in pages]
        assert sorted([*held, *self.driver.free_pages]) == list(range(PAGES))

    @invariant()
    def tokens_so_far_are_right(self) -> None:
        for outcome in self.driver.outcomes:
            expected = MODEL.generate(outcome.request)
            assert tuple(outcome.tokens) == expected[: len(outcome.tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.tick()
        while self.driver.busy:
            self.driver.tick()
        self.a_drained_row_has_told_what_was_in_flight_by_its_release()
        assert not self.driver._live
        for outcome in self.driver.outcomes:
            if outcome.finish is not FinishReason.CANCELLED:
                assert tuple(outcome.tokens) == MODEL.generate(outcome.request)
            assert outcome.finish is not None
            assert outcome.released == (outcome.row is not None)
        assert len(self.driver.free_pages) == PAGES
        assert not self.runtime.state.pages
        assert self.runtime.device.idle
        assert self.runtime.stats.slow == []
        assert self.runtime.stats.blocking_waits == self.runtime.stats.launches


TestPipelineMachine = pytest.mark.slow("random programs of steps, and checks behind each")(
    PipelineMachine.TestCase
)
TestPipelineMachine.settings = settings(
    max_examples=25 * EXAMPLES,
    stateful_step_count=50,
)
