"""The pipeline on the simulated device: exact traces, and one test per invariant that names it."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
from photon_ext.runtime.lease import LeaseState

from photon_ext.errors import NoFreeRow, PipelineError, RequestError
from photon_ext.runtime import pipeline as pipeline_module
from photon_ext.runtime import probe
from photon_ext.runtime.pipeline import Pipeline
from photon_ext.runtime.probe import Phase
from photon_ext.runtime.row import Row
from photon_ext.runtime.step import FinishReason, RowEvent, Step, StepKey, StepKind
from photon_ext.testing import (
    Chooser,
    Driver,
    Eager,
    Lazy,
    Random,
    Request,
    SimRuntime,
    ToyForward,
    ToyModel,
    check_invariants,
    explore,
)

MODEL = ToyModel(32)


def follow(tokens: tuple[int, ...]) -> set[int]:
    return {len(tokens), 16 + len(tokens)}


def requests(count: int, seed: int = 0, constrained: bool = True) -> list[Request]:
    """A mixed bag: lengths, stops, temperatures, constraints."""
    rng = random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(32) for _ in range(rng.randint(1, 12))),
            rng.randint(1, 9),
            stop_ids=tuple(rng.sample(range(32), rng.randint(0, 4))),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
            seed=rng.getrandbits(64),
            allowed=follow if constrained and rng.random() < 0.3 else None,
        )
        for _ in range(count)
    ]


def pipeline(runtime: SimRuntime, **options: object) -> Pipeline:
    return Pipeline(runtime, ToyForward(runtime), vocab_size=32, **options)  # type: ignore[arg-type]


def traced(driver: Driver, *prefixes: str) -> list[str]:
    runtime = driver._runtime
    assert isinstance(runtime, SimRuntime)
    return [entry for entry in runtime.device.trace if entry.startswith(prefixes)]


def numbers(entries: Iterable[str]) -> list[int]:
    return [int(entry.split()[-1]) for entry in entries]


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
    (tokens,) = driver.run(Request((1, 2, 3), 9, stop_ids=(stop,)))
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


# --- invariants -----------------------------------------------------------------------------------


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


def test_i3_refs_are_the_steps_in_flight_that_hold_the_lease() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    row = pipe.admit((1, 2), max_new_tokens=5)
    refs = [row.lease.inflight_refs]
    for call in (
        pipe.launch,
        pipe.launch,
        pipe.launch,
        pipe.commit,
        pipe.launch,
        pipe.commit,
        pipe.commit,
    ):
        call()
        check_invariants(pipe)
        refs.append(row.lease.inflight_refs)
    assert refs == [0, 1, 2, 2, 1, 2, 1, 0]


def test_i4_an_aborted_row_is_released_by_the_last_commit_that_used_it() -> None:
    released: list[Row] = []
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime, on_release=released.append)
    row = pipe.admit((1, 2), max_new_tokens=5)
    pipe.launch()
    pipe.launch()
    assert pipe.abort(row)
    assert row.lease.zombie
    assert (released, runtime.table.free_rows) == ([], 3)
    assert pipe.commit() == []
    assert released == []
    assert pipe.commit() == []
    assert (released, runtime.table.free_rows) == ([row], 4)
    assert row.lease.state is LeaseState.RELEASED
    assert not pipe.abort(row)
    assert not pipe.busy


@pytest.mark.parametrize("depth", [1, 2])
def test_i5_a_slot_is_taken_again_only_after_its_commit(depth: int) -> None:
    runtime = SimRuntime(depth=depth)
    pipe = pipeline(runtime)
    pipe.admit((1, 2), max_new_tokens=20)
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
        asked.append((row.committed, pipe.inflight))
        words[0] = -1

    pipe.admit((1, 2), max_new_tokens=3, constrained=True)
    first = pipe.launch()
    pipe.finalize(fill)
    second = pipe.launch()
    assert first is not None
    assert second is not None
    pipe.finalize(fill)
    assert (first.finalized, second.finalized, asked) == (True, False, [(0, 1)])
    (event,) = pipe.commit()
    assert event.token == MODEL.generate(Request((1, 2), 1))[0]
    pipe.finalize(fill)
    assert second.finalized
    assert asked == [(0, 1), (1, 1)]


def test_i6_a_turn_hands_out_events_before_it_fills_masks() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    pipe.admit((1, 2), max_new_tokens=4, constrained=True)
    seen: list[int] = []

    def fill(row: Row, words: memoryview) -> None:
        assert len(seen) == row.committed
        words[0] = -1

    while pipe.busy:
        pipe.tick(fill, lambda event: seen.append(event.token or 0))
    assert len(seen) == 4


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
            assert sorted(driver.free_pages) == list(range(1, rows * 8 + 1))


@pytest.mark.parametrize("depth", [1, 2])
def test_i9_the_owner_of_pages_hears_of_every_release_once(depth: int) -> None:
    """The owner knows nothing but what it gave to ``admit`` and what ``on_release`` says,
    however a row ends.
    """
    total = 24
    free, held, given = deque(range(1, total + 1)), dict[Row, tuple[int, ...]](), 0
    stop = MODEL.generate(Request((1, 2, 3), 2))[1]

    def on_release(row: Row) -> None:
        assert (row.lease.state, row.lease.inflight_refs) == (LeaseState.RELEASED, 0)
        free.extend(held.pop(row))  # a release that comes twice finds none

    def fill(row: Row, words: memoryview) -> None:
        if row.committed == 2:
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
                max_new_tokens=9,
                stop_ids=(stop,) * (given % 3 == 1),
                constrained=given % 3 == 2,
                pages=pages,
            )
            held[row], given = pages, given + 1
        if turn % 5 == 4:  # with steps in flight at depth 2
            for row in pipe.rows[-1:]:
                pipe.abort(row)
        pipe.tick(fill)
        assert set(held) == set(pipe.rows)
        assert sorted([*free, *(page for pages in held.values() for page in pages)]) == list(
            range(1, total + 1)
        )
    assert (held, pipe.busy) == ({}, False)
    assert given > 12


def test_i10_a_key_holds_the_shape_and_graphs_are_a_fixed_set() -> None:
    """Positions, rows, tokens and lengths vary under one key; the tokens stay right, so nothing
    of them is baked in.
    """
    keys: set[StepKey] = set()

    class Watched(Pipeline):
        def _key(self, kind: StepKind, segments: object, split: bool) -> StepKey:
            key = super()._key(kind, segments, split)  # type: ignore[arg-type]
            keys.add(key)
            return key

    driver = Driver(
        SimRuntime(5, 32),
        pipeline_type=Watched,
        buckets=(1, 2, 64),
        prefill_buckets=(4, 8, 99),
        chunk=8,
    )
    asked = requests(20, 7)
    assert driver.run(*asked) == [MODEL.generate(request) for request in asked]
    assert StepKey._fields == ("kind", "num_tokens", "segments", "split")
    assert {key for key in keys if key.kind is StepKind.DECODE} <= {
        StepKey(StepKind.DECODE, bucket, bucket, split)
        for bucket in (1, 2, 5)
        for split in (False, True)
    }
    assert {key for key in keys if key.kind is StepKind.PREFILL} <= {
        StepKey(StepKind.PREFILL, num_tokens, 5, split)
        for num_tokens in (4, 8)
        for split in (False, True)
    }


def test_i11_no_launch_while_a_step_waits_for_its_masks() -> None:
    pipe = pipeline(SimRuntime(depth=2))
    pipe.admit((1, 2), max_new_tokens=3, constrained=True)
    pipe.launch()
    with pytest.raises(
        PipelineError, match=r"step 0 waits for its masks: call finalize\(\) before the next launch"
    ):
        pipe.launch()
    with pytest.raises(PipelineError, match=r"call finalize\(\) before commit"):
        pipe.commit()


def test_every_invariant_has_a_test_that_names_it() -> None:
    promised = re.findall(r"^    (I\d+) ", pipeline_module.__doc__ or "", re.MULTILINE)
    named = re.findall(r"^def test_(i\d+)_", Path(__file__).read_text(), re.MULTILINE)
    assert promised == [f"I{number}" for number in range(1, 12)]
    assert {name.upper() for name in named} == set(promised)


# --- behaviour ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        (Request((1, 2, 3), 3),),
        (Request((1, 2, 3), 4), Request((4, 5), 2)),
        (Request((1, 2, 3), 2, allowed=follow), Request((4,), 1)),
        (Request((1, 2, 3), 9, stop_ids=(MODEL.generate(Request((1, 2, 3), 2))[1],)),),
    ],
)
@pytest.mark.parametrize("races", [True, False])
def test_ping_pong_is_right_under_every_interleaving(
    asked: tuple[Request, ...], races: bool
) -> None:
    expected = [MODEL.generate(request) for request in asked]

    def scenario(chooser: Chooser) -> None:
        assert Driver(SimRuntime(2, 12, chooser=chooser, check_races=races)).run(*asked) == expected

    found = explore(scenario)
    assert found.exhausted
    assert found.interleavings > 100


def test_a_partial_prefill_waits_for_no_mask() -> None:
    """Of a constrained row only the last chunk is sampled: the chunks before it run ahead, and
    send no masks.
    """
    runtime = SimRuntime(depth=2)
    pipe = pipeline(runtime, chunk=2)
    pipe.admit(tuple(range(6)), max_new_tokens=1, constrained=True)
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
    driver.run(Request((1, 2), 3, stop_ids=(last,)))
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
        pipe.admit(one.prompt_ids, max_new_tokens=6, constrained=one.allowed is not None)
        for one in asked
    ]
    told: dict[Row, list[int]] = {row: [] for row in rows}
    events, turns, raised = 0, 0, []

    def on_event(event: RowEvent) -> None:
        nonlocal events
        events += 1
        assert event.token is not None
        told[event.row].append(event.token)
        if events == 3 or turns == 5:
            raise KeyError(events)

    def fill(row: Row, words: memoryview) -> None:
        assert len(told[row]) == row.committed
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
    assert raised[1] % 2 == 1, "the first of the two that were raised in that turn"


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
    pipe.admit((1,), max_new_tokens=2)

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
    assert pipe.commit() == []
    assert pipe.launch() is None
    assert pipe.tick() == []
    pipe.finalize()


def test_more_rows_than_fit_is_not_now() -> None:
    pipe = pipeline(SimRuntime(max_rows=1))
    pipe.admit((1,), max_new_tokens=1)
    with pytest.raises(NoFreeRow, match="all 1 rows are in use"):
        pipe.admit((1,), max_new_tokens=1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, 32)}, r"prompt_ids contains 32; .* \[0, 32\)"),
        ({"prompt_ids": (-1,)}, "prompt_ids contains -1"),
        ({"stop_ids": (99,)}, "stop_ids contains 99"),
        ({"stop_ids": (1, 2, 3, 4, 5)}, "5 stop ids given; this runtime holds 4"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt_ids": (1,) * 60, "max_new_tokens": 6}, "exceed the context of 64"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"pages": ()}, "0 pages given; this request needs 1"),
        ({"pages": (1, 2)}, "2 pages given; this request needs 1, and a row holds 1"),
    ],
)
def test_a_bad_request_says_what_is_wrong_and_takes_nothing(
    bad: dict[str, object], message: str
) -> None:
    runtime = SimRuntime()
    pipe = pipeline(runtime)
    arguments = {"prompt_ids": (1, 2), "max_new_tokens": 3, **bad}
    with pytest.raises(RequestError, match=message):
        pipe.admit(arguments.pop("prompt_ids"), **arguments)  # type: ignore[arg-type]
    assert runtime.table.free_rows == 4
    assert runtime.table.take_deltas() == []


def test_pages_are_asked_for_where_a_row_has_several() -> None:
    pipe = pipeline(SimRuntime(page_size=4))
    with pytest.raises(
        RequestError, match="pages are missing: with page_size 4 this request needs 3 pages"
    ):
        pipe.admit((1,) * 8, max_new_tokens=3)
