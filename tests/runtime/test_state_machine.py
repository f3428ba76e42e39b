"""Hypothesis drives the pipeline call by call: every order of admit, launch, finalize, commit
and abort, with stops anywhere.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from photon_ext.errors import PipelineError
from photon_ext.runtime.step import FinishReason
from photon_ext.testing import Driver, Random, Request, SimRuntime, ToyModel, check_invariants
from photon_ext.testing.row_table import SimRowTable

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
    allowed=st.sampled_from([None, None, follow]),
)


class PipelineMachine(RuleBasedStateMachine):
    """A paged device whose pages and rows are both too few, so that requests wait and rows and
    pages are reused.
    """

    @initialize(
        depth=st.sampled_from([1, 2]),
        rows=st.integers(1, 3),
        chunk=st.sampled_from([1, 3, 8]),
        seed=st.integers(0, 999),
    )
    def start(self, depth: int, rows: int, chunk: int, seed: int) -> None:
        self.runtime = SimRuntime(rows, 16, depth, page_size=2, chooser=Random(seed))
        self.driver = Driver(self.runtime, pages=PAGES, chunk=chunk, prefill_buckets=(2, 8))
        self.pipe = self.driver.pipeline

    @property
    def waits_for_masks(self) -> bool:
        return bool(self.pipe._inflight) and not self.pipe._inflight[-1].finalized

    @rule(request=REQUESTS)
    def submit(self, request: Request) -> None:
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

    @rule(times=st.integers(1, 4))
    def tick(self, times: int) -> None:
        if self.waits_for_masks and self.pipe.inflight > 1:
            self.commit()
        self.pipe.finalize(self.driver.fill)
        for _ in range(times):
            self.driver.tick()

    @precondition(lambda self: self.driver.outcomes)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(self.driver.outcomes))
        ended = outcome.finish
        self.driver.cancel(outcome)
        assert outcome.finish is (ended or FinishReason.CANCELLED)
        self.driver.cancel(outcome)
        self.driver.admit()

    @invariant()
    def the_pipeline_holds(self) -> None:
        check_invariants(self.pipe)

    @invariant()
    def i9_pages_are_free_or_held(self) -> None:
        assert isinstance(self.runtime.table, SimRowTable)
        held = [page for pages in self.runtime.table.held_pages.values() for page in pages]
        assert sorted([*held, *self.driver.free_pages]) == list(range(1, PAGES + 1))

    @invariant()
    def tokens_so_far_are_right(self) -> None:
        for outcome in self.driver.outcomes:
            expected = MODEL.generate(outcome.request)
            assert tuple(outcome.tokens) == expected[: len(outcome.tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.tick(1)
        while self.driver.busy:
            self.driver.tick()
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


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
