"""What a commit reports, in columns and as events, and the records that it refuses."""

from __future__ import annotations

import pytest

from photon_ext.errors import PipelineError
from photon_ext.layout import RECORD_TOKENS, RECORD_WIDTH, RecordFlag
from photon_ext.row_params import RowParams
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.record import FLAGS, GENERATION, ROW
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import (
    Chunk,
    FinishReason,
    RowEvent,
    Step,
    StepKind,
    StepPlan,
    StepResult,
)
from photon_ext.testing import Request, SimRuntime, ToyForward
from tests.runtime.simulated import MODEL, pipeline


def commit_of_everything() -> tuple[StepResult, list[Row]]:
    """A mixed step of a row that goes on, one that was aborted, one that stops, one without a
    candidate, then chunks: one in the middle of its prompt, one at its end, one of an aborted row.
    """
    stop = MODEL.generate(Request((4,), 2))[1]
    pipe = pipeline(SimRuntime(8, depth=1), chunk=8)
    asked = [
        Request((2,), 9),
        Request((3,), 9),
        Request((4,), 9, stop_token_ids=(stop,)),
        Request((5,), 9, allowed=lambda tokens: ()),
        Request((6, 7, 8), 9),
        Request((7, 1), 9),
        Request((8, 1), 9),
        Request((9,), 2),
    ]
    rows = [pipe.admit(request.prompt_ids, request.params) for request in asked]

    def fill(row: Row, words: memoryview) -> None:
        words[0] = -1 if row.launched < 2 else 0

    pipe.launch(StepPlan((), tuple(Chunk(rows[i], 1) for i in (0, 1, 2, 3, 7))))
    pipe.finalize(fill)
    pipe.commit()
    pipe.launch(
        StepPlan(
            (rows[7], rows[3], rows[2], rows[1], rows[0]),
            (Chunk(rows[4], 2), Chunk(rows[6], 2), Chunk(rows[5], 2)),
        )
    )
    pipe.abort(rows[1])
    pipe.abort(rows[6])
    pipe.finalize(fill)
    return pipe.commit(), rows


def test_a_result_gives_events_in_the_order_of_its_step() -> None:
    result, rows = commit_of_everything()
    events = list(result)
    assert [event.row for event in events] == [rows[i] for i in (7, 3, 2, 0, 5)]
    assert [event.finish for event in events] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.STOP,
        None,
        None,
    ]
    assert [event.tokens for event in events] == [
        MODEL.generate(Request((9,), 2))[1:],
        (),
        MODEL.generate(Request((4,), 2))[1:],
        MODEL.generate(Request((2,), 2))[1:],
        MODEL.generate(Request((7, 1), 1)),
    ]
    assert "no token can be sampled at position 1" in str(events[1].error)
    assert all(isinstance(event, RowEvent) for event in events)


def test_the_columns_of_a_result() -> None:
    result, rows = commit_of_everything()
    assert len(result) == len(list(result)) == 5
    assert result.count == 4
    assert result.rows == tuple(rows[i] for i in (7, 3, 2, 1, 0))
    assert sorted(result.events) == [0, 1, 2, 7]
    events = list(result)
    assert [result.tokens_of(i) for i in (0, 2, 4)] == [events[i].tokens for i in (0, 2, 3)]
    assert (result.tokens_of(1), result.tokens_of(3)) == ((), ())
    assert not result.even
    assert isinstance(result.step, Step)


def test_a_result_of_nothing_is_empty() -> None:
    result = pipeline(SimRuntime()).commit()
    assert (result.step, list(result), len(result), result.count) == (None, [], 0, 0)


@pytest.mark.parametrize(
    ("given", "short"), [((2, 2), {}), ((1, 0), {0: 1, 1: 0}), ((2, 1), {1: 1})]
)
def test_a_result_names_the_rows_that_got_fewer_tokens_than_a_step_may_give(
    given: tuple[int, int], short: dict[int, int]
) -> None:
    pipe = pipeline(SimRuntime(depth=1, step_tokens=2, gives=lambda launch, row: given[row - 1]))
    rows = [pipe.admit((n,), RowParams(9)) for n in (2, 3)]
    pipe.launch(StepPlan((), tuple(Chunk(row, 1) for row in rows)))
    pipe.commit()
    pipe.launch(StepPlan(tuple(rows)))
    result = pipe.commit()
    assert (result.short, result.count) == (short, sum(given))
    assert [len(result.tokens_of(column)) for column in (0, 1)] == [*given]
    assert [row.committed for row in rows] == [1 + tokens for tokens in given]
    assert [row.launched for row in rows] == [1 + tokens for tokens in given]


FOREIGN = "the step's outputs are not its own"


@pytest.mark.parametrize(
    ("segment", "column", "value", "message"),
    [
        (0, ROW, 2, f"its record says row 2, .*{FOREIGN}"),
        (1, ROW, 1, f"its record says row 1, .*{FOREIGN}"),
        (0, GENERATION, 2, f"its record says row 1, generation 2, .*{FOREIGN}"),
        (1, GENERATION, 0, f"its record says row 2, generation 0, .*{FOREIGN}"),
        (0, FLAGS, RecordFlag.DEAD, r"the device says that it is dead \(flags 4\), and nobody has"),
        (1, FLAGS, RecordFlag.DEAD, f"its record says row 2, generation 1, flags 4; {FOREIGN}"),
        (0, RECORD_TOKENS, 32, r"sampling gave token 32; ids lie in \[0, 32\)"),
        (1, RECORD_TOKENS, 99, r"sampling gave token 99; ids lie in \[0, 32\)"),
        (0, RECORD_TOKENS, -5, r"sampling gave token -5; ids lie in \[0, 32\)"),
        (1, RECORD_TOKENS, -1, r"sampling gave token -1; ids lie in \[0, 32\)"),
    ],
)
def test_a_record_that_no_step_can_leave_is_refused_by_its_row(
    segment: int, column: int, value: int, message: str
) -> None:
    """Of a decode row, and of a chunk beside it."""

    class Tampering(Pipeline):
        def _wait(self, step: Step) -> memoryview:
            records = super()._wait(step)
            if step.key.kind is StepKind.MIXED:
                records[segment * RECORD_WIDTH + column] = value
            return records

    runtime = SimRuntime(depth=1)
    pipe = Tampering(runtime, ToyForward(runtime), vocab_size=32)
    rows = [pipe.admit((3,), RowParams(9)), pipe.admit((4, 5), RowParams(9))]
    pipe.launch(StepPlan((), (Chunk(rows[0], 1),)))
    pipe.commit()
    pipe.launch(StepPlan((rows[0],), (Chunk(rows[1], 2),)))
    with pytest.raises(PipelineError, match=rf"^Row\({segment + 1}, generation 1.*{message}"):
        pipe.commit()
    with pytest.raises(PipelineError, match="the pipeline cannot go on"):
        pipe.launch()
