"""Every planted bug is found within a bounded search, by the rule it breaks, and by its tokens
where only values are looked at.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import cache

import pytest

from photon_ext.errors import PipelineError
from photon_ext.layout import RECORD_TOKENS, RECORD_WIDTH
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.ports import SlotPort
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import Fill, RowEvent, Step, StepPlan, StepResult
from photon_ext.testing import (
    Chooser,
    Counterexample,
    Driver,
    Fault,
    Request,
    Scenario,
    SimError,
    SimLeaseError,
    SimOverwrite,
    SimPoison,
    SimRace,
    SimRuntime,
    ToyModel,
    explore,
    replay,
    sample,
)
from photon_ext.testing.slot import SimSlot
from tests.runtime.automaton_driver import WORDS, AutomatonDriver, asked

MODEL = ToyModel(32)


def follow(tokens: tuple[int, ...]) -> set[int]:
    """A constraint that a mask built from too few tokens would break."""
    return {len(tokens), 16 + len(tokens)}


def lead(tokens: tuple[int, ...]) -> set[int]:
    """Another, which allows none of the same."""
    return {8 + len(tokens), 24 + len(tokens)}


PLAIN = (Request((1, 2, 3), 4), Request((4, 5), 3))
QUIET = (Request((1, 2), 7),)
LONG_PROMPT = (Request((1, 2, 3, 4, 5, 6, 7), 3),)
HELD = (Request((1, 2, 3), 4, allowed=follow), Request((4, 5), 3))
BOTH_HELD = (Request((1, 2, 3), 4, allowed=follow), Request((4, 5), 3, allowed=lead))
STOPPED = (
    Request((1, 2, 3), 5, stop_token_ids=(MODEL.generate(Request((1, 2, 3), 2))[1],)),
    Request((4, 5, 6), 6),
    Request((9,), 4),
)
SHAPED = (asked("abc", (1, 2, 3), 4), asked("abc", (4, 5), 3), asked("digits", (6, 7, 8), 3))
NEVER = 10**6  # later than any tick or step


def scenario(
    requests: tuple[Request, ...],
    *,
    fault: Fault | None = None,
    pipeline: type[Pipeline] = Pipeline,
    driver: type[Driver] = Driver,
    cancel_at: int = NEVER,
    chunk: int = 8,
    paged: bool = False,
    races: bool = True,
) -> Scenario:
    """Serves ``requests`` on 2 rows, cancels the first at a tick, and compares every token with
    the oracle.
    """

    def run(chooser: Chooser) -> None:
        page_size, pages = (2, 6) if paged else (None, 0)
        runtime = SimRuntime(
            2,
            16,
            page_size=page_size,
            automaton_words=WORDS,
            chooser=chooser,
            fault=fault,
            check_races=races,
        )
        engine = driver(runtime, pipeline_type=pipeline, chunk=chunk, pages=pages)
        outcomes = [engine.submit(request) for request in requests]
        ticks = 0
        while engine.busy:
            if ticks == cancel_at:
                engine.cancel(outcomes[0])
            engine.tick()
            ticks += 1
            assert ticks < 100
        for outcome in outcomes:
            expected = MODEL.generate(outcome.request)
            cancelled = cancel_at != NEVER and outcome is outcomes[0]
            assert tuple(outcome.tokens) == (
                expected[: len(outcome.tokens)] if cancelled else expected
            )
            assert outcome.finish is not None
        assert runtime.device.idle
        assert runtime.stats.slow == []

    return run


@cache
def check_without_fault(
    requests: tuple[Request, ...], options: tuple[tuple[str, object], ...]
) -> None:
    """The search finds nothing where no bug is planted."""
    clean = scenario(requests, **dict(options))  # type: ignore[arg-type]
    explore(clean, 150)
    sample(clean, 50)


def finding(
    planted: Scenario, search: Callable[[Scenario, int], object] = sample, runs: int = 300
) -> Exception:
    """What a bounded search finds; the counterexample must fail again when it is replayed."""
    with pytest.raises(Counterexample) as found:
        search(planted, runs)
    with pytest.raises(type(found.value.error)):
        replay(planted, found.value.choices)
    return found.value.error


# --- bugs below the pipeline ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "requests", "options", "rule"),
    [
        (Fault.DROP_INPUT_WAIT, PLAIN, {}, SimRace),
        (Fault.DROP_MASK_WAIT, HELD, {}, SimRace),
        (Fault.DROP_OUTPUT_WAIT, PLAIN, {}, (SimRace, SimPoison)),
        (Fault.COMMIT_WITHOUT_WAIT, PLAIN, {}, (SimRace, SimPoison)),
        (Fault.DELTAS_OFF_STREAM, PLAIN, {"cancel_at": 2}, SimRace),
        (Fault.STALE_DELTAS, PLAIN, {}, AssertionError),
        (Fault.STAGED_REUSED, LONG_PROMPT, {"chunk": 1}, AssertionError),
        (Fault.LATE_OUT_COPY, PLAIN, {}, AssertionError),
        (Fault.EXTRA_WAIT, PLAIN, {}, AssertionError),
        (Fault.RESEND, QUIET, {}, AssertionError),
        (Fault.AUTOMATON_OFF_STREAM, SHAPED, {"driver": AutomatonDriver}, (SimRace, SimPoison)),
        (Fault.STATE_KEPT, SHAPED, {"driver": AutomatonDriver}, AssertionError),
    ],
)
def test_device_fault_is_found(
    fault: Fault, requests: tuple[Request, ...], options: dict[str, object], rule: type[Exception]
) -> None:
    check_without_fault(requests, tuple(options.items()))
    assert isinstance(finding(scenario(requests, fault=fault, **options)), rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (Fault.DROP_INPUT_WAIT, PLAIN),
        (Fault.DROP_MASK_WAIT, HELD),
        (Fault.DROP_OUTPUT_WAIT, PLAIN),
        (Fault.COMMIT_WITHOUT_WAIT, PLAIN),
    ],
)
def test_dropped_wait_is_found_by_values_alone(fault: Fault, requests: tuple[Request, ...]) -> None:
    error = finding(scenario(requests, fault=fault, races=False))
    assert isinstance(error, (AssertionError, PipelineError))
    assert not isinstance(error, SimRace)


def test_every_fault_is_tried() -> None:
    (mark,) = test_device_fault_is_found.pytestmark
    assert {case[0] for case in mark.args[1]} == set(Fault)


def test_staged_tokens_that_were_consumed_end_the_row_loudly() -> None:
    """The device's half of the protection: a slot that forgets to send a chunk writes no wrong
    tokens, and the commit says so.
    """

    class Forgetful(Driver):
        def tick(self) -> None:
            for slot in self.pipeline._slots:
                assert isinstance(slot, SimSlot)
                slot._fault = Fault.STAGED_REUSED
            super().tick()

    error = finding(scenario(LONG_PROMPT, driver=Forgetful, chunk=1))
    assert isinstance(error, PipelineError)
    assert "the step's outputs are not its own" in str(error)


# --- bugs in the pipeline -------------------------------------------------------------------------


class ReusesSlot(Pipeline):
    """Takes slot 0 while its step is in flight."""

    def _free_slot(self) -> int:
        return 0


class ReleasesEarly(Pipeline):
    """Gives row and pages back at the end of a sequence, steps in flight or not."""

    def _take_unused(self) -> list[Row]:
        committed, self._committed = self._committed, NEVER
        unused = super()._take_unused()
        self._committed = committed
        return unused


class ReleasesTwice(Pipeline):
    def _take_unused(self) -> list[Row]:
        unused = super()._take_unused()
        for row in unused:
            self._runtime.table.release(row.index)
        return unused


class MasksEarly(Pipeline):
    """Builds and sends masks while the step before is not committed."""

    def finalize(self, fill: Fill | None = None) -> None:
        waiting, self._inflight = self._inflight, deque(list(self._inflight)[-1:])
        super().finalize(fill)
        self._inflight = waiting


class ShiftsMasks(Pipeline):
    """Writes the mask of each row in the place of the next one."""

    def _write_mask(self, slot: SlotPort, index: int, row: Row, fill: Fill | None) -> None:
        super()._write_mask(slot, index + 1, row, fill)


class SwapsMasks(Pipeline):
    """Fills the mask of each row with what another may have."""

    def _write_mask(self, slot: SlotPort, index: int, row: Row, fill: Fill | None) -> None:
        others = [other for other in self.running_set.decode if other is not row]
        assert fill is not None
        super()._write_mask(slot, index, row, lambda _, words: fill((*others, row)[0], words))


class LaunchesOverLogits(Pipeline):
    """Launches while a step waits for its masks."""

    def launch(self, plan: StepPlan | None = None) -> Step | None:
        waiting = [step for step in self._inflight if not step.finalized]
        for step in waiting:
            step.finalized = True
        launched = super().launch(plan)
        for step in waiting:
            step.finalized = False
        return launched

    def finalize(self, fill: Fill | None = None) -> None:
        waiting, self._inflight = (
            self._inflight,
            deque(step for step in self._inflight if not step.finalized),
        )
        while len(self._inflight) > 1:
            self._inflight.pop()
        super().finalize(fill)
        self._inflight = waiting

    def tick(
        self, fill: Fill | None = None, on_event: Callable[[RowEvent], None] | None = None
    ) -> StepResult:
        self.launch()
        return super().tick(fill, on_event)


class DeliversZombies(Pipeline):
    """Tells also what was sampled for rows that had ended."""

    def _wait(self, step: Step) -> memoryview:
        self._records = super()._wait(step)
        return self._records

    def _read(self) -> tuple[StepResult, list[Row]]:
        result, unused = super()._read()
        if end := len(result.rows) * RECORD_WIDTH:
            result.tokens = [array("i", self._records[RECORD_TOKENS:end:RECORD_WIDTH].tolist())]
        return result, unused


class PagesBackEarly(Driver):
    """Takes pages back when a sequence ends, not when its row is released."""

    def _return(self, row: Row | None) -> None:
        if row is not None:
            self.free_pages.extend(row.pages)

    def take(self, event: RowEvent) -> None:
        super().take(event)
        if event.finish is not None:
            self._return(event.row)

    def on_release(self, row: Row) -> None:
        kept = list(self.free_pages)
        super().on_release(row)
        self.free_pages = deque(kept)


@pytest.mark.parametrize(
    ("pipeline", "requests", "options", "rule"),
    [
        (ReusesSlot, PLAIN, {}, (SimRace, AssertionError)),
        (ReleasesEarly, PLAIN, {"cancel_at": 2}, SimRace),
        (ReleasesEarly, STOPPED, {}, SimError),
        (ReleasesTwice, PLAIN, {}, SimLeaseError),
        (MasksEarly, HELD, {}, AssertionError),
        (ShiftsMasks, BOTH_HELD, {}, AssertionError),
        (SwapsMasks, BOTH_HELD, {}, AssertionError),
        (LaunchesOverLogits, HELD, {}, SimOverwrite),
        (DeliversZombies, PLAIN, {"cancel_at": 2}, SimLeaseError),
    ],
)
def test_pipeline_fault_is_found(
    pipeline: type[Pipeline],
    requests: tuple[Request, ...],
    options: dict[str, int],
    rule: type[Exception],
) -> None:
    check_without_fault(requests, tuple(options.items()))
    assert isinstance(finding(scenario(requests, pipeline=pipeline, **options), explore), rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipeline", "requests", "options"),
    [
        (ReusesSlot, PLAIN, {}),
        (ReleasesEarly, STOPPED, {}),
        (ReleasesEarly, PLAIN, {"cancel_at": 2}),
    ],
)
def test_early_reuse_is_found_by_values_alone(
    pipeline: type[Pipeline], requests: tuple[Request, ...], options: dict[str, int]
) -> None:
    error = finding(scenario(requests, pipeline=pipeline, races=False, **options))  # type: ignore[arg-type]
    assert isinstance(error, (AssertionError, PipelineError))
    assert not isinstance(error, SimRace)


def test_hazard_6_pages_returned_early_are_found() -> None:
    requests = (STOPPED[0], Request((4, 5, 6), 2), Request((9, 8, 7), 4))
    sample(scenario(requests, paged=True), 50)
    error = finding(scenario(requests, paged=True, driver=PagesBackEarly))
    assert isinstance(error, SimLeaseError)
    assert "still holds" in str(error)
