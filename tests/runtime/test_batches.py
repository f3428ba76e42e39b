"""Rows that decode together: a steady step costs nothing, and who joins, leaves or ends while steps
are in flight changes no other row's tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest
import torch

from photon_ext.errors import PipelineError
from photon_ext.layout import SEGMENT_COLUMNS
from photon_ext.row_params import RowParams
from photon_ext.runtime import Pipeline, Runtime
from photon_ext.runtime.ports import RuntimePort
from photon_ext.runtime.row import Row, RowState
from photon_ext.runtime.step import FinishReason, StepKey, StepPlan, StepTensors
from photon_ext.testing import (
    Chooser,
    Driver,
    Random,
    Request,
    SimRuntime,
    check_invariants,
    explore,
)
from photon_ext.testing.stub import StubDevice
from tests.runtime.simulated import MODEL, follow, pipeline

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Launches:
    """What the slots of a pipeline were given, and how many words each launch sent."""

    def __init__(self, pipe: Pipeline) -> None:
        self.words: list[array[int]] = []
        self.sent: list[int] = []
        for slot in pipe._slots:
            self._watch(slot)

    def _watch(self, slot: Any) -> None:
        launch = slot.launch

        def watched(key: StepKey, segments: array[int], *rest: object) -> int:
            self.words.append(segments)
            self.sent.append(launch(key, segments, *rest))
            return self.sent[-1]

        slot.launch = watched


def runtime_of(kind: str, rows: int, depth: int) -> RuntimePort:
    if kind == "simulated":
        return SimRuntime(rows, 64, depth)
    return Runtime(max_rows=rows, max_len=64, depth=depth, device="cpu")


@pytest.mark.parametrize(
    ("max_rows", "rows", "bucket"),
    [(256, 1, 1), (256, 2, 8), (256, 9, 16), (256, 33, 64), (256, 129, 256), (40, 33, 40)],
)
def test_rows_ride_in_a_graph_for_at_most_twice_as_many(
    max_rows: int, rows: int, bucket: int
) -> None:
    pipe = Pipeline(StubDevice(max_rows), lambda step: None, vocab_size=32)
    for _ in range(rows):
        pipe.admit((1,), RowParams(9), [0])
    steps = [pipe.launch(), pipe.launch()]
    assert [step.key.decode_rows for step in steps if step is not None] == [0, bucket]


def test_start_up_captures_three_graphs_for_each_bucket_and_slot() -> None:
    logits = torch.zeros(33, 32)

    def forward(step: StepTensors) -> None:
        step.logits = logits[: len(step.segments)]

    runtime = Runtime(max_rows=33, max_len=8, depth=2, device="cpu")
    Pipeline(runtime, forward, vocab_size=32, prefill_buckets=(4,))
    assert runtime.report is not None
    assert runtime.report.graphs == 3 * 2 * len((1, 8, 16, 32, 33, 4))


@DEPTHS
@pytest.mark.parametrize("kind", ["simulated", "real"])
def test_a_quiet_decode_step_has_the_words_of_the_one_before_and_sends_none(
    kind: str, depth: int
) -> None:
    driver = Driver(runtime_of(kind, 2, depth), graph=kind == "simulated")
    launches = Launches(driver.pipeline)
    asked = Request((1, 2, 3), 12), Request((4, 5), 20)
    assert driver.run(*asked) == [MODEL.generate(request) for request in asked]
    both, one = launches.words[1:12], launches.words[12:]
    assert (len(both), len(one)) == (11, 8)  # the prompts' step has sampled a token of each
    assert all(words is both[0] for words in both)
    assert all(words is one[0] for words in one)
    assert len(both[0]) == 2 * SEGMENT_COLUMNS
    assert len(one[0]) == SEGMENT_COLUMNS
    changed = [step for step, sent in enumerate(launches.sent) if sent]
    assert changed == ([0, 1, 12] if depth == 1 else [0, 1, 2, 12, 13])
    assert driver.pipeline.stats.quiet_steps == 20 - len(changed)


@DEPTHS
@pytest.mark.parametrize("caps", [(2, 5, 5, 9), (1, 1, 1, 1), (9, 2, 1, 3), (4, 4, 4, 5)])
def test_hazard_9_a_batch_is_made_anew_before_a_covered_cap_is_launched(
    caps: tuple[int, ...], depth: int
) -> None:
    pipe = pipeline(SimRuntime(depth=depth))
    rows = [pipe.admit((1 + i,), RowParams(cap)) for i, cap in enumerate(caps)]
    ridden: Counter[Row] = Counter()
    tokens: Counter[Row] = Counter()
    while pipe.busy:
        while (step := pipe.launch()) is not None:
            ridden.update(step.rows)
        tokens.update(event.row for event in pipe.commit())
        check_invariants(pipe)
    assert [ridden[row] for row in rows] == list(caps)
    assert [tokens[row] for row in rows] == list(caps)
    assert pipe.stats.zombie_rows == 0
    assert pipe.stats.steps == max(caps)


@pytest.mark.parametrize("turns", range(1, 8))
@DEPTHS
def test_a_row_that_joins_in_mid_flight_changes_no_tokens(depth: int, turns: int) -> None:
    driver = Driver(SimRuntime(depth=depth, chooser=Random(turns)), chunk=2)
    asked = [Request((1, 2, 3), 9), Request((4, 5), 7), Request((6, 7, 8, 9, 10), 6)]
    for request in asked:
        driver.submit(request)
        for _ in range(turns):
            driver.tick()
    while driver.busy:
        driver.tick()
    assert [tuple(outcome.tokens) for outcome in driver.outcomes] == [
        MODEL.generate(request) for request in asked
    ]


def test_rows_that_end_by_a_stop_leave_the_others_under_every_interleaving() -> None:
    """The stop of the first is seen while a step that holds it runs; the third takes its row."""
    stop = MODEL.generate(Request((1, 2, 3), 2))[1]
    asked = (Request((1, 2, 3), 5, stop_token_ids=(stop,)), Request((4, 5), 5), Request((6,), 2))
    expected = [MODEL.generate(request) for request in asked]

    def scenario(chooser: Chooser) -> None:
        driver = Driver(SimRuntime(2, 12, chooser=chooser))
        assert driver.run(*asked) == expected
        assert driver.pipeline.stats.zombie_rows == 1

    assert explore(scenario, 500).interleavings > 100


@pytest.mark.parametrize("end", ["abort", "drain"])
def test_a_row_that_ends_after_it_went_over_to_another_batch(end: str) -> None:
    """Steps of both batches are in flight: an abort is heard by the older one, too."""
    released: list[Row] = []
    pipe = pipeline(SimRuntime(depth=2), on_release=released.append)
    asked = Request((1, 2), 8), Request((3,), 8)
    first, second = (pipe.admit(request.prompt_ids, request.params) for request in asked)
    pipe.launch()
    pipe.commit()
    pipe.launch(StepPlan((first,)))
    pipe.launch(StepPlan((first, second)))
    assert getattr(pipe, end)(first)
    heard = [[(event.row, *event.tokens) for event in pipe.commit()] for _ in range(2)]
    _, one, two = MODEL.generate(asked[0])[:3]
    other = MODEL.generate(asked[1])[1]
    if end == "abort":
        assert heard == [[], [(second, other)]]
        assert pipe.stats.zombie_rows == 2
    else:
        assert heard == [[(first, one)], [(first, two), (second, other)]]
        assert pipe.stats.zombie_rows == 0
    assert released == [first]
    check_invariants(pipe)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("launches", range(6))
@DEPTHS
def test_a_drained_row_delivers_what_is_in_flight_and_is_released_once(
    depth: int, launches: int, constrained: bool
) -> None:
    """After so many launches, which leaves as many steps in flight as the depth allows; one of a
    constrained row still waits for its mask then.
    """
    released: list[Row] = []
    pipe = pipeline(SimRuntime(depth=depth), on_release=released.append, chunk=2)
    asked = Request((1, 2, 3), 15, allowed=follow if constrained else None)
    row = pipe.admit(asked.prompt_ids, asked.params)
    tokens: list[int] = []
    ends = []

    def fill(row: Row, words: memoryview) -> None:
        words[0] = sum(1 << token for token in follow(tuple(tokens)))

    def commit() -> None:
        for event in pipe.commit():
            assert (event.row, event.error) == (row, None)
            tokens.extend(event.tokens)
            ends.append(event.finish)
        pipe.finalize(fill)

    for _ in range(launches):
        pipe.finalize(fill)
        if not pipe.can_launch:
            commit()
        assert pipe.launch() is not None
    launched = row.launched
    assert pipe.drain(row)
    assert not pipe.drain(row)
    assert row.state is (RowState.DRAINING if pipe.inflight else RowState.RELEASED)
    pipe.finalize(fill)
    while pipe.inflight:
        assert not released
        commit()
        check_invariants(pipe)
    assert tuple(tokens) == MODEL.generate(asked)[:launched]
    assert (set(ends) - {None}, released, row.state) == (set(), [row], RowState.RELEASED)
    assert pipe.launch() is None
    assert (row.launched, pipe.busy, pipe.stats.zombie_rows) == (launched, False, 0)
    assert not pipe.abort(row)


def test_a_drained_row_may_still_end_by_its_stop_or_be_aborted() -> None:
    stop = MODEL.generate(Request((1, 2), 2))[1]
    pipe = pipeline(SimRuntime(depth=2))
    stopped = pipe.admit((1, 2), RowParams(9, stop_token_ids=(stop,)))
    aborted = pipe.admit((3,), RowParams(9))
    pipe.launch()
    pipe.launch()
    for row in (stopped, aborted):
        assert pipe.drain(row)
    assert [event.finish for event in pipe.commit()] == [None, None]
    assert pipe.abort(aborted)
    (event,) = pipe.commit()
    assert (event.row, event.tokens, event.finish) == (stopped, (stop,), FinishReason.STOP)
    assert (stopped.state, aborted.state, pipe.busy) == (
        RowState.RELEASED,
        RowState.RELEASED,
        False,
    )


def test_a_row_is_drained_by_the_pipeline_that_admitted_it() -> None:
    pipes = [pipeline(SimRuntime()) for _ in range(2)]
    rows = [pipe.admit((1,), RowParams(2)) for pipe in pipes]
    with pytest.raises(PipelineError, match="was admitted by another pipeline"):
        pipes[0].drain(rows[1])
    assert all(row.running for row in rows)
