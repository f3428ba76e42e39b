"""The failures of other engines that concern the pipeline, each shown not to happen here.

Numbers are those of the hazard list.
"""

from __future__ import annotations

import gc

import pytest

from photon_ext.errors import PipelineError
from photon_ext.layout import RECORD_WIDTH, RowColumn
from photon_ext.row_params import RowParams
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import FinishReason, RowEvent, Step, StepKind
from photon_ext.testing import Driver, Random, Request, SimRuntime
from tests.runtime.simulated import MODEL, pipeline

LONG = Request((1, 2, 3), 9)
SHORT = Request((4, 5), 4)


def allow_all(row: Row, words: memoryview) -> None:
    words[0] = -1


@pytest.mark.parametrize("ticks", range(12))
def test_hazard_7_counts_do_not_underflow_when_a_request_leaves_at_any_point(ticks: int) -> None:
    driver = Driver(SimRuntime(2, chooser=Random(ticks)))
    leaving, staying = driver.submit(LONG), driver.submit(SHORT)
    for _ in range(ticks):
        driver.tick()
    driver.cancel(leaving)
    while driver.busy:
        driver.tick()
    assert tuple(staying.tokens) == MODEL.generate(SHORT)


@pytest.mark.parametrize("sits_out", [1, 2, 3])
def test_hazard_8_a_row_that_sits_out_a_step_keeps_its_token(sits_out: int) -> None:
    """Prefill steps of another request come between two decode steps."""
    driver = Driver(SimRuntime(2), chunk=2)
    first = driver.submit(LONG)
    for _ in range(4):
        driver.tick()
    other = Request(tuple(range(2 * sits_out)), 3)
    second = driver.submit(other)
    while driver.busy:
        driver.tick()
    assert (tuple(first.tokens), tuple(second.tokens)) == (
        MODEL.generate(LONG),
        MODEL.generate(other),
    )


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_hazard_9_no_step_is_launched_past_the_cap(cap: int, depth: int) -> None:
    runtime = SimRuntime(depth=depth)
    Driver(runtime).run(Request((1, 2), cap))
    assert runtime.stats.launches == cap


@pytest.mark.parametrize("ticks", range(10))
@pytest.mark.parametrize("depth", [1, 2])
def test_hazard_10_abort_and_finish_release_once(ticks: int, depth: int) -> None:
    released: list[Row] = []
    pipe = pipeline(SimRuntime(depth=depth), on_release=released.append)
    row = pipe.admit((1, 2), RowParams(5))
    for _ in range(ticks):
        pipe.tick()
    told = pipe.stats.tokens
    aborted = pipe.abort(row)
    assert not pipe.abort(row)
    while pipe.busy:
        pipe.tick()
    assert released == [row]
    assert aborted == (told < 5)
    assert pipe.stats.tokens == told
    assert not pipe.abort(row)


def test_hazard_11_an_abort_reaches_a_row_wherever_it_is() -> None:
    """Before its first launch, between chunks, in flight, waiting for its mask, and as a zombie."""
    runtime = SimRuntime(5)
    pipe = pipeline(runtime, chunk=2)
    rows = [pipe.admit((1, 2, 3, 4, 5), RowParams(9, constrained=i == 3)) for i in range(4)]
    assert pipe.abort(rows[0])
    assert rows[0] not in pipe.rows
    pipe.launch()
    assert pipe.abort(rows[1])
    assert rows[1] in pipe.rows  # in flight
    while rows[3].launched == 0:
        pipe.tick(allow_all)
    for row in (rows[2], rows[3]):
        assert pipe.abort(row)
        assert not pipe.abort(row)
    while pipe.busy:
        pipe.tick(allow_all)
    assert runtime.table.free_rows == 5


def test_hazard_13_a_cancel_touches_no_other_request() -> None:
    """At every tick of a batch, with pages that fill up just then."""
    for ticks in range(16):
        driver = Driver(SimRuntime(3, 16, page_size=2), pages=24)
        outcomes = [
            driver.submit(request)
            for request in (LONG, SHORT, Request((7,), 8, allowed=lambda tokens: (len(tokens),)))
        ]
        for _ in range(ticks):
            driver.tick()
        ended = outcomes[0].finish
        driver.cancel(outcomes[0])
        while driver.busy:
            driver.tick()
        assert outcomes[0].finish is (ended or FinishReason.CANCELLED)
        for outcome in outcomes[1:]:
            assert tuple(outcome.tokens) == MODEL.generate(outcome.request)
            assert outcome.finish is FinishReason.LENGTH
        assert sorted(driver.free_pages) == list(range(24))


def test_hazard_15_a_reused_row_takes_nothing_from_its_last_holder() -> None:
    driver = Driver(SimRuntime(1))
    asked = [LONG, SHORT, Request((9,), 5), LONG]
    assert driver.run(*asked) == [MODEL.generate(request) for request in asked]
    rows = [outcome.row for outcome in driver.outcomes if outcome.row is not None]
    assert [(row.index, row.generation) for row in rows] == [(1, 1), (1, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize("column", [0, 1], ids=["row", "generation"])
@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])
def test_hazard_15_a_record_of_another_row_or_generation_is_refused(
    kind: StepKind, segment: int, column: int
) -> None:
    class Tampering(Pipeline):
        def _wait(self, step: Step) -> memoryview:
            records = super()._wait(step)
            if step.key.kind is kind:
                records[segment * RECORD_WIDTH + column] += 1
            return records

    driver = Driver(SimRuntime(), pipeline_type=Tampering)
    with pytest.raises(
        PipelineError,
        match=rf"Row\({segment + 1}, generation 1, .*: its record says .*; the step's outputs are "
        "not its own",
    ):
        driver.run(SHORT, LONG)
    assert all(outcome.finish is None for outcome in driver.outcomes)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_hazard_16_a_penalty_counts_the_token_just_sampled(depth: int, seed: int) -> None:
    """Also while the host has not seen that token, and in a row whose index had other tokens."""
    runtime = SimRuntime(1, depth=depth, chooser=Random(seed), max_biases=3, penalty_vocab=32)
    driver = Driver(runtime)
    biases = {3: 60.0, 7: 60.0, 9: 60.0}
    requests = [
        Request((1, 3), 12, logit_bias=biases, frequency_penalty=2.0, presence_penalty=2.0),
        Request((1, 3), 12, logit_bias=biases, frequency_penalty=2.0, repetition_penalty=3.0),
        Request((1, 3), 12, logit_bias=biases),
    ]
    outcomes = [driver.submit(request) for request in requests]
    while driver.busy:
        driver.tick()
    found = [tuple(outcome.tokens) for outcome in outcomes]
    assert found == [MODEL.generate(request) for request in requests]
    assert {*found[0], *found[1]} <= {*biases}
    assert 3 not in found[1][:2]  # it is in the prompt
    assert len({*found}) == 3


def test_hazard_17_a_missing_mask_is_closed() -> None:
    """A constraint that raises leaves no mask; the row ends in an error, and its neighbour does
    not notice.
    """

    def raising(tokens: tuple[int, ...]) -> tuple[int, ...]:
        if len(tokens) == 2:
            raise KeyError("no such state")
        return (7,)

    driver = Driver(SimRuntime())
    assert driver.run(Request((1, 2), 5, allowed=raising), LONG) == [(7, 7), MODEL.generate(LONG)]
    assert driver.outcomes[0].finish is FinishReason.ERROR
    assert "the constraint raised at position 3: KeyError" in str(driver.outcomes[0].error)
    assert driver.outcomes[1].finish is FinishReason.LENGTH


def test_hazard_17_a_mask_of_an_earlier_step_does_not_count() -> None:
    """The slot's mask memory still holds what an earlier lease of the row sent for the same
    position.
    """
    pipe = pipeline(SimRuntime(max_rows=1, depth=1))
    pipe.admit((1, 2), RowParams(1, constrained=True))
    assert [event.finish for event in pipe.tick(allow_all)] == [FinishReason.LENGTH]

    def nothing(row: Row, words: memoryview) -> None:
        raise ValueError("late")

    row = pipe.admit((3, 4), RowParams(1, constrained=True))
    (event,) = pipe.tick(nothing)
    assert (event.row, event.tokens, event.finish) == (row, (), FinishReason.ERROR)


def test_hazard_17_a_mask_of_an_earlier_lease_does_not_touch_a_free_row() -> None:
    """A row without a constraint takes over row and position of one with; a neighbour still
    needs a mask.
    """
    pipe = pipeline(SimRuntime(max_rows=2, depth=1))

    def only_seven(row: Row, words: memoryview) -> None:
        words[0] = 1 << 7

    for _ in range(2):
        pipe.admit((1, 2), RowParams(1, constrained=True))
    assert [token for event in pipe.tick(only_seven) for token in event.tokens] == [7, 7]
    pipe.admit((3, 4), RowParams(1))
    pipe.admit((3, 4), RowParams(1, constrained=True))
    assert [token for event in pipe.tick(only_seven) for token in event.tokens] == [
        MODEL.generate(Request((3, 4), 1))[0],
        7,
    ]


def test_hazard_17_masks_that_nobody_fills_are_an_error_of_the_caller() -> None:
    """The step still waits for them, and is sampled once they come."""
    pipe = pipeline(SimRuntime())
    pipe.admit((1, 2), RowParams(1, constrained=True))
    pipe.launch()
    with pytest.raises(PipelineError, match=r"is constrained: finalize\(\) needs a fill callback"):
        pipe.finalize()
    pipe.finalize(allow_all)
    (event,) = pipe.commit()
    assert (event.tokens, event.error) == (MODEL.generate(Request((1, 2), 1)), None)


@pytest.mark.parametrize("offset", [-1, 1])
def test_hazard_18_a_mask_for_another_position_is_refused(offset: int) -> None:
    runtime = SimRuntime()
    driver = Driver(runtime)
    for slot in driver.pipeline._slots:
        write = slot.write_mask
        slot.write_mask = lambda i, row, position, fill, write=write: write(
            i, row, position + offset, fill
        )  # type: ignore[method-assign,misc]
    driver.run(Request((1, 2), 4, allowed=lambda tokens: (7,)), SHORT)
    assert driver.outcomes[0].tokens == []
    assert "no mask arrived for position 1" in str(driver.outcomes[0].error)
    assert tuple(driver.outcomes[1].tokens) == MODEL.generate(SHORT)


def test_hazard_18_masks_do_not_shift_when_a_row_leaves_between_launch_and_finalize() -> None:
    pipe = pipeline(SimRuntime(3))
    rows = [pipe.admit((i + 1,), RowParams(4, constrained=True)) for i in range(3)]
    tokens: dict[int, list[int]] = {row.index: [] for row in rows}
    asked: list[int] = []

    def fill(row: Row, words: memoryview) -> None:
        asked.append(row.index)
        words[0] = 1 << (10 + row.index)

    pipe.launch()
    pipe.abort(rows[1])
    pipe.finalize(fill)
    while pipe.busy:
        pipe.tick(fill, lambda event: tokens[event.row.index].extend(event.tokens))
    assert tokens == {1: [11] * 4, 2: [], 3: [13] * 4}
    assert asked == [1, 3] * 4


def test_hazard_19_ten_thousand_steps_do_not_grow() -> None:
    runtime = SimRuntime(2, 64, chooser=Random(1))
    driver = Driver(runtime)

    def serve(steps: int) -> int:
        end = runtime.stats.launches + steps
        while runtime.stats.launches < end:
            constrained = len(driver.outcomes) % 5 == 0
            driver.run(
                Request((1, 2, 3), 20, allowed=(lambda tokens: (1, 2, 3)) if constrained else None),
                Request((4,), 17, stop_token_ids=(len(driver.outcomes) % 32,)),
            )
            if len(driver.outcomes) >= 10:
                driver.outcomes.clear()
        driver.outcomes.clear()
        gc.collect()
        return len(gc.get_objects())

    serve(300)
    before = serve(300)
    after = serve(9_400)
    assert runtime.stats.launches >= 10_000
    assert after - before < 50
    assert len(runtime.state.pages) == 0
    assert runtime.stats.slow == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_hazard_27_a_partial_prefill_is_never_sampled(chunk: int) -> None:
    pipe = pipeline(SimRuntime(depth=1), chunk=chunk)
    row = pipe.admit(tuple(range(7)), RowParams(1))
    events: list[RowEvent] = []
    for step in range(-(-7 // chunk)):
        assert events == [], f"chunk {step}"
        events = list(pipe.tick())
    assert [(event.row, event.tokens, event.finish) for event in events] == [
        (row, MODEL.generate(Request(tuple(range(7)), 1)), FinishReason.LENGTH)
    ]


def test_a_constraint_is_not_asked_about_a_partial_prefill() -> None:
    """A step that samples one constrained row, and holds the first chunk of another: a
    constraint may count how often it is asked.
    """
    pipe = pipeline(SimRuntime(2), chunk=4)
    rows = [
        pipe.admit(prompt, RowParams(2, constrained=True))
        for prompt in ((1, 2), (3, 4, 5, 6, 7, 8))
    ]
    asked: list[tuple[Row, int]] = []

    def fill(row: Row, words: memoryview) -> None:
        asked.append((row, row.prefilled))
        words[0] = -1

    while pipe.busy:
        pipe.tick(fill)
    assert sorted(asked, key=lambda entry: entry[0].index) == [
        (rows[0], 2),
        (rows[0], 2),
        (rows[1], 6),
        (rows[1], 6),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_hazard_28_a_prompt_of_many_chunks_does_not_starve_a_running_row(depth: int) -> None:
    """Nor does the row starve the prompt: their steps take turns."""
    pipe = pipeline(SimRuntime(depth=depth), chunk=1)
    running = pipe.admit((1,), RowParams(20))
    pipe.tick()
    prompt = pipe.admit(tuple(range(12)), RowParams(1))
    kinds = []
    while prompt.wants_prefill:
        step = pipe.launch()
        assert step is not None
        kinds.append(step.key.kind)
        pipe.commit()
    assert kinds == [StepKind.DECODE, StepKind.PREFILL] * 12
    assert running.launched == 1 + kinds.count(StepKind.DECODE)


def test_hazard_36_a_quiet_step_applies_no_old_deltas() -> None:
    """The slot's device input still holds them; position and last token must go on from where
    they are.
    """
    runtime = SimRuntime(1, depth=2)
    driver = Driver(runtime)
    outcome = driver.submit(Request((1, 2, 3), 9))
    for _ in range(4):
        driver.tick()
    position_of = runtime.state.tables.row_state[1, RowColumn.POSITION].item
    quiet, position = driver.pipeline.stats.quiet_steps, position_of()
    for _ in range(4):
        driver.tick()
    assert driver.pipeline.stats.quiet_steps == quiet + 4
    assert position_of() == position + 4
    while driver.busy:
        driver.tick()
    assert tuple(outcome.tokens) == MODEL.generate(outcome.request)


def test_hazard_36_changed_is_judged_per_slot() -> None:
    """A row that leaves changes the segments of both slots, each once."""
    runtime = SimRuntime(2, depth=2)
    driver = Driver(runtime)
    driver.submit(Request((1, 2, 3), 30))
    driver.submit(Request((4, 5), 6))
    sent: list[int] = []
    while driver.busy:
        before = runtime.stats.copies_in
        driver.tick()
        sent.append(runtime.stats.copies_in - before)
    assert sum(sent) == 5  # the prompts, the first decode of each slot, and one fewer row in each
    assert runtime.stats.slow == []


def test_hazard_38_logits_of_a_split_step_outlive_until_their_sampling() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    pipe.admit((1, 2), RowParams(3, constrained=True))
    pipe.admit((3,), RowParams(3))
    pipe.launch()
    with pytest.raises(PipelineError, match="I11"):
        pipe.launch()
    pipe.finalize(allow_all)
    assert pipe.launch() is not None
    records = pipe._slots[0].wait(2)
    assert records[4] == MODEL.generate(Request((1, 2), 1))[0]
    assert records[RECORD_WIDTH + 4] == MODEL.generate(Request((3,), 1))[0]
