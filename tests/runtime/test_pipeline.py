"""The pipeline on the simulated device: exact traces, and how it behaves."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest

from photon_ext.errors import NoFreeRow
from photon_ext.row_params import RowParams
from photon_ext.runtime import probe
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import FinishReason, RowEvent, Step
from photon_ext.testing import (
    Chooser,
    Driver,
    Eager,
    Lazy,
    Request,
    SimRuntime,
    check_invariants,
    explore,
)
from tests.runtime.simulated import MODEL, follow, pipeline, traced

# --- traces ---------------------------------------------------------------------------------------


def test_trace_of_the_blocking_loop() -> None:
    driver = Driver(SimRuntime(depth=1))
    driver.run(Request((1, 2, 3), 3))
    assert traced(driver, "") == [
        "host launches 0",
        "copy input 0",
        "step 0",
        "copy output 0",
        "host commits 0",
        "host launches 1",
        "copy input 1",
        "step 1",
        "copy output 1",
        "host commits 1",
        "host launches 2",
        "step 2",
        "copy output 2",
        "host commits 2",
        "host releases row 1",
    ]


def test_whether_the_device_idles_and_whether_the_latest_step_awaits_its_masks() -> None:
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime)
    assert pipe.idles
    assert not pipe.awaits_masks
    pipe.admit((1, 2), RowParams(constrained=True, max_new_tokens=3))
    pipe.launch()
    assert pipe.awaits_masks
    pipe.finalize(lambda row, words: words.__setitem__(0, 2))
    assert not pipe.awaits_masks
    assert not pipe.idles
    runtime.device.synchronize()
    assert pipe.idles


def test_trace_of_ping_pong_on_the_slowest_device() -> None:
    driver = Driver(SimRuntime(depth=2))
    driver.run(Request((1, 2, 3), 4))
    assert traced(driver, "host") == [
        "host launches 0",
        "host launches 1",
        "host commits 0",
        "host launches 2",
        "host commits 1",
        "host launches 3",
        "host commits 2",
        "host commits 3",
        "host releases row 1",
    ]


def test_trace_of_ping_pong_on_the_fastest_device() -> None:
    driver = Driver(SimRuntime(depth=2, chooser=Eager()))
    driver.run(Request((1, 2, 3), 3))
    assert traced(driver, "") == [
        "host launches 0",
        "copy input 0",
        "step 0",
        "copy output 0",
        "host launches 1",
        "host commits 0",
        "copy input 1",
        "step 1",
        "copy output 1",
        "host launches 2",
        "host commits 1",
        "copy input 2",
        "step 2",
        "copy output 2",
        "host commits 2",
        "host releases row 1",
    ]


def test_trace_of_a_constrained_row() -> None:
    driver = Driver(SimRuntime(depth=2))
    driver.run(Request((1, 2, 3), 3, allowed=follow))
    assert traced(driver, "host") == [
        "host launches 0",
        "host finalizes 0",
        "host launches 1",
        "host commits 0",
        "host finalizes 1",
        "host launches 2",
        "host commits 1",
        "host finalizes 2",
        "host commits 2",
        "host releases row 1",
    ]
    assert traced(driver, "forward", "sampling", "copy mask") == [
        "forward 0",
        "copy mask 0",
        "sampling 0",
        "forward 1",
        "copy mask 1",
        "sampling 1",
        "forward 2",
        "copy mask 2",
        "sampling 2",
    ]


def test_trace_of_a_stop_that_leaves_a_zombie() -> None:
    stop = MODEL.generate(Request((1, 2, 3), 2))[1]
    driver = Driver(SimRuntime(depth=2))
    (tokens,) = driver.run(Request((1, 2, 3), 9, stop_token_ids=(stop,)))
    assert tokens[-1] == stop
    assert traced(driver, "host") == [
        "host launches 0",
        "host launches 1",
        "host commits 0",
        "host launches 2",
        "host commits 1",  # the stop is seen here, while step 2 runs
        "host commits 2",
        "host releases row 1",
    ]
    assert driver.pipeline.stats.zombie_rows == 1


# --- behaviour ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        (Request((1, 2, 3), 3),),
        (Request((1, 2, 3), 4), Request((4, 5), 2)),
        (Request((1, 2, 3), 2, allowed=follow), Request((4,), 1)),
        (Request((1, 2, 3), 9, stop_token_ids=(MODEL.generate(Request((1, 2, 3), 2))[1],)),),
    ],
)
def test_ping_pong_is_right_under_every_interleaving(asked: tuple[Request, ...]) -> None:
    """Values are compared, and races reported: with those let be, it would find no more."""
    expected = [MODEL.generate(request) for request in asked]

    def scenario(chooser: Chooser) -> None:
        assert Driver(SimRuntime(2, 12, chooser=chooser)).run(*asked) == expected

    found = explore(scenario)
    assert found.exhausted
    assert found.interleavings > 100


def test_a_partial_prefill_waits_for_no_mask() -> None:
    """Of a constrained row only the last chunk is sampled: the chunks before it run ahead, and
    send no masks.
    """
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime, chunk=2)
    pipe.admit(tuple(range(6)), RowParams(1, constrained=True))
    finalized = []
    for _ in range(3):
        step = pipe.launch()
        assert step is not None
        finalized.append(step.finalized)
        if pipe.inflight == 2:
            pipe.commit()
    assert finalized == [True, True, False]


def test_a_capped_row_makes_no_zombie() -> None:
    driver = Driver(SimRuntime(depth=2))
    driver.run(Request((1, 2), 1), Request((3,), 5))
    assert driver.pipeline.stats.zombie_rows == 0
    assert [outcome.finish for outcome in driver.outcomes] == [FinishReason.LENGTH] * 2


def test_stop_wins_over_length_when_both_are_due() -> None:
    last = MODEL.generate(Request((1, 2), 3))[-1]
    driver = Driver(SimRuntime())
    driver.run(Request((1, 2), 3, stop_token_ids=(last,)))
    assert driver.outcomes[0].finish is FinishReason.STOP


def test_a_constraint_that_allows_nothing_ends_its_row_alone() -> None:
    driver = Driver(SimRuntime(chooser=Lazy()))
    bad, good = (
        Request((1, 2), 5, allowed=lambda tokens: () if len(tokens) == 2 else (7,)),
        Request((3, 4), 6),
    )
    assert driver.run(bad, good) == [(7, 7), MODEL.generate(good)]
    assert driver.outcomes[0].finish is FinishReason.ERROR
    assert "no token can be sampled at position 3" in str(driver.outcomes[0].error)
    assert driver.outcomes[1].error is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("constrained", [(), (0,), (1,), (0, 1)])
def test_what_on_event_raises_costs_no_row_a_token(
    depth: int, constrained: tuple[int, ...]
) -> None:
    """The callback raises on the third event, and on every event of a later turn: each event
    comes once, masks follow their tokens.
    """
    asked = [Request((i + 1,), 6, allowed=follow if i in constrained else None) for i in range(2)]
    pipe = pipeline(SimRuntime(depth=depth))
    rows = [
        pipe.admit(one.prompt_ids, RowParams(6, constrained=one.allowed is not None))
        for one in asked
    ]
    told: dict[Row, list[int]] = {row: [] for row in rows}
    events, turns, raised = 0, 0, []
    filled: list[tuple[int, int]] = []  # tokens sampled before the mask, tokens told before it

    def on_event(event: RowEvent) -> None:
        nonlocal events
        events += 1
        told[event.row] += event.tokens
        if events == 3 or turns == 5:
            raise KeyError(events)

    def fill(row: Row, words: memoryview) -> None:
        filled.append((row.launched - 1, len(told[row])))
        words[0] = sum(1 << token for token in follow(tuple(told[row])))

    while pipe.busy:
        turns += 1
        try:
            pipe.tick(fill, on_event)
        except KeyError as error:
            raised.append(error.args[0])
        check_invariants(pipe)
    assert [tuple(told[row]) for row in rows] == [MODEL.generate(one) for one in asked]
    assert (raised[0], len(raised), events) == (3, 2, 12)
    assert all(sampled == heard for sampled, heard in filled)
    assert len(filled) == 6 * len(constrained)
    assert raised[1] % 2 == 1, "the first of the two that were raised in that turn"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_row_is_released_behind_its_last_event(depth: int, drains: bool, raises: bool) -> None:
    """Whoever takes pages back on a release has heard of all that the row gave: also where it was
    drained, and where the callback raises.
    """
    told: list[str] = []
    pipe = pipeline(SimRuntime(depth=depth), on_release=lambda row: told.append("release"))
    row = pipe.admit((1,), RowParams(3))

    def on_event(event: RowEvent) -> None:
        told.append("event")
        if raises:
            raise KeyError("a callback's fault")

    while pipe.busy:
        with suppress(KeyError):
            pipe.tick(on_event=on_event)
        if drains and row.launched == 2:
            pipe.drain(row)
    assert told == ["event"] * (2 if drains else 3) + ["release"]


class OpenPhases:
    """A probe that counts the phases that are open."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, phase: Phase, step: int | None) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1

    def launched(self, step: Step, words: int) -> None: ...

    def committed(self, step: Step, zombies: int) -> None: ...


def test_a_turn_whose_callback_raised_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases that an observer sees are closed, and what was raised is not kept by a cycle of
    its own frames.
    """
    phases = OpenPhases()
    monkeypatch.setattr(probe, "active", phases)
    pipe = pipeline(SimRuntime(depth=1))
    pipe.admit((1,), RowParams(2))

    class Unlucky(Exception):
        pass

    def on_event(event: RowEvent) -> None:
        raise Unlucky

    raised: list[weakref.ref[Unlucky]] = []
    gc.disable()
    try:
        for _ in range(2):
            try:
                pipe.tick(on_event=on_event)
            except Unlucky as error:
                raised.append(weakref.ref(error))
            assert phases.count == 0
        assert [one() for one in raised] == [None, None]
    finally:
        gc.enable()
    assert not pipe.busy


def test_commit_of_nothing_is_empty() -> None:
    pipe = pipeline(SimRuntime())
    assert list(pipe.commit()) == []
    assert pipe.launch() is None
    assert list(pipe.tick()) == []
    pipe.finalize()


def test_more_rows_than_fit_is_not_now() -> None:
    pipe = pipeline(SimRuntime(max_rows=1))
    pipe.admit((1,), RowParams(1))
    with pytest.raises(NoFreeRow, match="all 1 rows are in use"):
        pipe.admit((1,), RowParams(1))
