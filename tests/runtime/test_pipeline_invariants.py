"""One test at least per invariant of the pipeline, which names it."""

from __future__ import annotations

import re
from collections import Counter, deque
from pathlib import Path

import pytest

from photon_ext.errors import PipelineError
from photon_ext.row_params import RowParams
from photon_ext.runtime import pipeline as pipeline_module
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import NEVER, Row, RowState
from photon_ext.runtime.step import Step, StepKey, StepPlan
from photon_ext.testing import Driver, Random, Request, SimRuntime, check_invariants
from tests.runtime.simulated import MODEL, numbers, pipeline, requests, traced


@pytest.mark.parametrize("seed", range(5))
def test_i1_forwards_run_in_launch_order_on_the_compute_stream(seed: int) -> None:
    driver = Driver(SimRuntime(max_rows=3, chooser=Random(seed)))
    driver.run(*requests(6, seed))
    forwards = numbers(traced(driver, "step", "forward"))
    assert forwards == list(range(forwards[0], forwards[-1] + 1))


@pytest.mark.parametrize("seed", range(5))
def test_i2_commits_are_first_in_first_out(seed: int) -> None:
    driver = Driver(SimRuntime(max_rows=3, chooser=Random(seed)))
    driver.run(*requests(6, seed))
    commits = numbers(traced(driver, "host commits"))
    assert commits == list(range(commits[0], commits[-1] + 1))


def test_i3_a_row_is_in_use_as_long_as_the_last_step_that_holds_it_is_in_flight() -> None:
    released: list[Row] = []
    pipe = pipeline(SimRuntime(depth=2), on_release=released.append, chunk=2)
    row = pipe.admit((1, 2, 3), RowParams(5))
    assert row.last_step == NEVER
    last_steps = []
    for call in (
        pipe.launch,  # the first chunk
        pipe.launch,  # the last one
        pipe.commit,
        pipe.launch,  # decode
    ):
        call()
        check_invariants(pipe)
        last_steps.append(row.last_step)
    assert last_steps == [0, 1, 1, 2]
    assert pipe.abort(row)
    other = pipe.admit((7,), RowParams(1))
    for _ in range(2):
        assert not released
        assert pipe.rows == (row, other)
        pipe.commit()
        check_invariants(pipe)
    assert (released, row.last_step, pipe.rows) == ([row], 2, (other,))


@pytest.mark.parametrize("end", ["abort", "drain"])
def test_i4_a_row_that_no_step_uses_is_released_at_once(end: str) -> None:
    """Before its first launch, and between two steps; a step that holds others is nothing to it."""
    released: list[Row] = []
    pipe = pipeline(SimRuntime(depth=2), on_release=released.append)
    first, other = pipe.admit((1, 2), RowParams(5)), pipe.admit((3, 4), RowParams(5))
    third = pipe.admit((5,), RowParams(5))
    assert getattr(pipe, end)(third)
    assert (released, third.state) == ([third], RowState.RELEASED)
    pipe.tick()
    pipe.commit()
    pipe.launch(StepPlan((other,)))
    assert getattr(pipe, end)(first)
    assert (released, first.state) == ([third, first], RowState.RELEASED)
    check_invariants(pipe)
    for row in (first, third):
        assert not pipe.abort(row)
        assert not pipe.drain(row)
    assert released == [third, first]


def test_i4_an_aborted_row_is_released_by_the_last_commit_that_used_it() -> None:
    released: list[Row] = []
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime, on_release=released.append)
    row = pipe.admit((1, 2), RowParams(5))
    pipe.launch()
    pipe.launch()
    assert pipe.abort(row)
    assert row.state is RowState.FINISHED
    assert (released, runtime.table.free_rows) == ([], 3)
    assert len(pipe.commit()) == 0
    assert released == []
    assert len(pipe.commit()) == 0
    assert (released, runtime.table.free_rows) == ([row], 4)
    assert row.state is RowState.RELEASED
    assert not pipe.abort(row)
    assert not pipe.busy


@pytest.mark.parametrize("depth", [1, 2])
def test_i5_a_slot_is_taken_again_only_after_its_commit(depth: int) -> None:
    runtime = SimRuntime(depth=depth)
    pipe = pipeline(runtime)
    pipe.admit((1, 2), RowParams(20))
    taken = []
    for _ in range(depth):
        taken.append(pipe.launch())
    assert pipe.launch() is None
    assert [step.slot for step in taken if step is not None] == list(range(depth))
    for turn in range(6):
        pipe.commit()
        step = pipe.launch()
        assert step is not None
        assert step.slot == turn % depth
    assert pipe.launch() is None


def test_i6_masks_wait_for_the_commit_of_the_step_before() -> None:
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime)
    asked: list[tuple[int, int]] = []

    def fill(row: Row, words: memoryview) -> None:
        asked.append((pipe.stats.tokens, pipe.inflight))
        words[0] = -1

    pipe.admit((1, 2), RowParams(3, constrained=True))
    first = pipe.launch()
    pipe.finalize(fill)
    second = pipe.launch()
    assert first is not None
    assert second is not None
    pipe.finalize(fill)
    assert (first.finalized, second.finalized, asked) == (True, False, [(0, 1)])
    (event,) = pipe.commit()
    assert event.tokens == MODEL.generate(Request((1, 2), 1))
    pipe.finalize(fill)
    assert second.finalized
    assert asked == [(0, 1), (1, 1)]


def test_i6_a_turn_hands_out_events_before_it_fills_masks() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    pipe.admit((1, 2), RowParams(4, constrained=True))
    seen: list[int] = []
    asked_after: list[int] = []

    def fill(row: Row, words: memoryview) -> None:
        asked_after.append(len(seen))
        words[0] = -1

    while pipe.busy:
        pipe.tick(fill, lambda event: seen.extend(event.tokens))
    assert len(seen) == 4
    assert asked_after == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2])
def test_i7_a_step_has_one_blocking_wait_and_a_quiet_one_sends_nothing(depth: int) -> None:
    runtime = SimRuntime(depth=depth)
    driver = Driver(runtime)
    driver.submit(Request((1, 2, 3), 60))
    for _ in range(4):
        driver.tick()
    before, sent = runtime.stats.blocking_waits, runtime.stats.bytes_in
    quiet = driver.pipeline.stats.quiet_steps
    for _ in range(40):
        driver.tick()
    assert runtime.stats.blocking_waits - before == 40
    assert runtime.stats.bytes_in == sent
    assert driver.pipeline.stats.quiet_steps - quiet == 40
    assert runtime.stats.slow == []


@pytest.mark.parametrize("seed", range(12))
def test_i8_tokens_do_not_depend_on_depth_batch_or_schedule(seed: int) -> None:
    asked = requests(7, seed)
    expected = [MODEL.generate(request) for request in asked]
    for depth in (1, 2):
        for rows, chunk, graph in ((1, 3, True), (2, 1, False), (4, 8, True)):
            runtime = SimRuntime(rows, 32, depth, page_size=4, chooser=Random(seed))
            driver = Driver(runtime, pages=rows * 8, chunk=chunk, graph=graph, prefill_buckets=(2,))
            assert driver.run(*asked) == expected
            assert runtime.stats.slow == []
            assert sorted(driver.free_pages) == list(range(rows * 8))


@pytest.mark.parametrize("depth", [1, 2])
def test_i9_the_owner_of_pages_hears_of_every_release_once(depth: int) -> None:
    """The owner knows nothing but what it gave to ``admit`` and what ``on_release`` says,
    however a row ends.
    """
    total = 24
    free, held, given = deque(range(total)), dict[Row, tuple[int, ...]](), 0
    told: Counter[Row] = Counter()
    stop = MODEL.generate(Request((1, 2, 3), 2))[1]

    def on_release(row: Row) -> None:
        assert row.state is RowState.RELEASED
        free.extend(held.pop(row))  # a release that comes twice finds none

    def fill(row: Row, words: memoryview) -> None:
        if told[row] == 2:
            raise KeyError("no such state")
        words[0] = -1

    pipe = pipeline(
        SimRuntime(4, 16, depth, page_size=2, chooser=Random(depth)), on_release=on_release
    )
    for turn in range(40):
        # by turns: to the cap, a stop, a constraint that fails
        while pipe._runtime.table.free_rows and len(free) >= 6 and turn < 30:
            pages = tuple(free.popleft() for _ in range(6))
            row = pipe.admit(
                (1, 2, 3),
                RowParams(
                    9,
                    stop_token_ids=(stop,) * (given % 3 == 1),
                    constrained=given % 3 == 2,
                ),
                pages,
            )
            held[row], given = pages, given + 1
        if turn % 5 == 4:  # with steps in flight at depth 2
            for row in pipe.rows[-1:]:
                (pipe.drain if turn % 2 else pipe.abort)(row)
        pipe.tick(fill, lambda event: told.update([event.row]))
        assert set(held) == set(pipe.rows)
        assert sorted([*free, *(page for pages in held.values() for page in pages)]) == list(
            range(total)
        )
    assert (held, pipe.busy) == ({}, False)
    assert given > 12


def test_i10_a_key_holds_the_shape_and_graphs_are_a_fixed_set() -> None:
    """Positions, rows, tokens and lengths vary under one key; the tokens stay right, so nothing
    of them is baked in.
    """
    keys: set[StepKey] = set()

    class Watched(Pipeline):
        def launch(self, plan: StepPlan | None = None) -> Step | None:
            step = super().launch(plan)
            if step is not None:
                keys.add(step.key)
            return step

    driver = Driver(
        SimRuntime(5, 32),
        pipeline_type=Watched,
        buckets=(1, 2, 64),
        prefill_buckets=(4, 8, 99),
        chunk=8,
    )
    asked = requests(20, 7)
    assert driver.run(*asked) == [MODEL.generate(request) for request in asked]
    sizes, features = StepKey._fields[:3], StepKey._fields[3:]
    assert sizes == ("decode_rows", "chunk_tokens", "chunks")
    assert features == ("split", "features", "scored")
    decode = {StepKey(bucket, 0, 0, split) for bucket in (1, 2, 5) for split in (False, True)}
    chunks = (4, 4), (8, 5)  # a chunk has a token, and a row one chunk
    prefill = {StepKey(0, *size, split) for size in chunks for split in (False, True)}
    assert keys <= decode | prefill
    assert len(keys & decode) > 3
    assert len(keys & prefill) > 2


def test_i11_no_launch_while_a_step_waits_for_its_masks() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    pipe.admit((1, 2), RowParams(3, constrained=True))
    pipe.launch()
    with pytest.raises(
        PipelineError, match=r"step 0 waits for its masks: call finalize\(\) before the next launch"
    ):
        pipe.launch()
    with pytest.raises(PipelineError, match=r"call finalize\(\) before commit"):
        pipe.commit()


def test_every_invariant_has_a_test_that_names_it() -> None:
    design = Path(pipeline_module.__file__).parents[1] / "README.md"
    promised = re.findall(r"^\| (I\d+) \|", design.read_text(), re.MULTILINE)
    others = ("test_paging.py", "test_adapter_slots.py")
    engine = (Path(__file__).parents[1] / "engine" / name for name in others)
    files = (Path(__file__), Path(__file__).with_name("test_automata.py"), *engine)
    tests = "".join(file.read_text() for file in files)
    assert {name.upper() for name in re.findall(r"^def test_(i\d+)_", tests, re.MULTILINE)} == {
        *promised
    }
    assert [*promised[:13], promised[-1]] == [f"I{number}" for number in (*range(1, 14), 15)]
