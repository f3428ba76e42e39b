"""Rows with automata on the simulated device: their states, and until when the words stay."""

from __future__ import annotations

import pytest
import torch

from photon_ext.layout import RowColumn
from photon_ext.runtime.step import FinishReason
from photon_ext.sampling.token_automaton import TokenAutomaton
from photon_ext.scheduling.automaton_pool import AutomatonPool
from photon_ext.testing import (
    Chooser,
    Counterexample,
    Request,
    SimRace,
    SimRuntime,
    ToyModel,
    explore,
    sample,
)
from tests.ops.automata import automaton, vocabulary
from tests.runtime.automaton_driver import (
    MACHINES,
    WORDS,
    AutomatonDriver,
    EarlyRelease,
    asked,
)

MODEL = ToyModel(32)


def served(driver: type[AutomatonDriver], cancel_at: int | None = None) -> object:
    """Requests with both automata, of which the pool holds one at a time; the first is cancelled
    at a tick.
    """

    def run(chooser: Chooser) -> None:
        requests = (asked("abc", (1, 2, 3)), asked("digits", (6, 7, 8)), Request((9, 1), 5))
        runtime = SimRuntime(2, 16, automaton_words=WORDS, chooser=chooser)
        engine = driver(runtime)
        outcomes = [engine.submit(request) for request in requests]
        ticks = 0
        while engine.busy:
            if ticks == cancel_at:
                engine.cancel(outcomes[0])
            engine.tick()
            ticks += 1
        for outcome in outcomes[cancel_at is not None :]:
            assert tuple(outcome.tokens) == MODEL.generate(outcome.request)
        assert engine.most_resident == 1
        assert engine.pool.held == 0
        assert engine.pipeline.stats.split_steps == 0

    return run


def test_rows_with_automata_run_ahead_and_keep_to_their_forms() -> None:
    explore(served(AutomatonDriver), 100)  # type: ignore[arg-type]
    sample(served(AutomatonDriver), 50)  # type: ignore[arg-type]


def test_i14_an_automaton_stays_until_no_step_in_flight_reads_it() -> None:
    """As hazard 14 has it of adapters: what is in use is evicted, and another answers."""
    sample(served(AutomatonDriver, cancel_at=2), 100)  # type: ignore[arg-type]
    with pytest.raises(Counterexample) as found:
        sample(served(EarlyRelease, cancel_at=2), 300)  # type: ignore[arg-type]
    assert isinstance(found.value.error, SimRace)


def test_hazard_15_a_reused_row_begins_at_the_state_of_its_own_automaton() -> None:
    """The state is written with the row, and is not what an earlier lease has left."""
    runtime = SimRuntime(1, 16, automaton_words=WORDS)
    engine = AutomatonDriver(runtime)
    requests = (asked("abc", (1, 2, 3)), asked("abc", (1, 2, 3)), Request((1, 2, 3), 4))
    first, second, plain = engine.run(*requests)
    assert first == second == MODEL.generate(requests[0])
    assert plain == MODEL.generate(requests[2])


def test_hazard_17_a_lost_state_ends_its_row_alone() -> None:
    """A state that is none allows nothing, and the row says so."""
    runtime = SimRuntime(2, 16, automaton_words=WORDS)
    engine = AutomatonDriver(runtime)
    broken, other = (engine.submit(asked("abc", prompt)) for prompt in ((1, 2, 3), (4, 5)))
    for _ in range(3):
        engine.tick()
    assert broken.row is not None
    runtime.device.synchronize()
    runtime.state.put_back_state(broken.row.index, 10**6)
    while engine.busy:
        engine.tick()
    assert broken.finish is FinishReason.ERROR
    assert "automaton" in str(broken.error)
    assert tuple(other.tokens) == MODEL.generate(other.request)


def test_the_state_is_a_column_that_publish_advances() -> None:
    runtime = SimRuntime(1, 16, automaton_words=WORDS)
    engine = AutomatonDriver(runtime)
    request = asked("abc", (1, 2, 3), 5)
    outcome = engine.submit(request)
    while len(outcome.tokens) < 4:
        engine.tick()
    runtime.device.synchronize()
    assert outcome.row is not None
    state = int(runtime.state.tables.row_state[outcome.row.index, RowColumn.AUTOMATON_STATE])
    tokens = MODEL.generate(request)
    # of the tokens that are committed, or of those in flight besides
    assert state in [MACHINES["abc"].state_after(tokens[:count]) for count in (4, 5)]


class Words:
    """The words of a pool, as they are written."""

    def __init__(self, pool: AutomatonPool) -> None:
        self.memory = torch.zeros(pool.words, dtype=torch.int32)
        self.writes = 0
        self._pool = pool

    def hold(self, machine: TokenAutomaton) -> int | None:
        """As the pool; and what is to be written is."""
        begin = self._pool.hold(machine)
        for offset, words in self._pool.take_writes():
            self.memory[offset : offset + len(words)] = words
            self.writes += 1
        return begin


def machines(count: int) -> list[TokenAutomaton]:
    tokens = vocabulary(40)
    return [automaton(f"a{{{i + 1}}}", tokens) for i in range(count)]


def test_a_pool_shares_what_is_the_same_and_evicts_the_least_recently_used() -> None:
    first, second, third = machines(3)
    size = len(first.vocabulary.tables) + 2 * len(third.tables)
    pool = AutomatonPool(size)
    words = Words(pool)
    begin = words.hold(first)
    assert begin == len(first.vocabulary.tables)
    assert words.hold(first) == begin
    assert words.writes == 2  # the vocabulary, and it
    assert words.hold(second) is not None
    assert words.hold(third) is None  # both are held
    pool.release(first)
    assert words.hold(third) is None  # once more
    pool.release(first)
    assert words.hold(first) == begin  # it was still there
    assert words.writes == 3
    pool.release(second)
    pool.release(first)
    at = words.hold(third)
    assert at is not None
    assert torch.equal(words.memory[at : at + len(third.tables)], third.tables)
    assert (pool.resident, pool.held) == (2, 1)
    assert words.hold(first) == begin  # the second gave way
    assert pool.held_bytes == 4 * (len(first.tables) + len(third.tables))


def test_a_pool_finds_gaps_and_never_writes_into_what_is_held() -> None:
    many = machines(8)
    vocabulary_words = len(many[0].vocabulary.tables)
    size = vocabulary_words + 4 * len(many[7].tables)
    pool = AutomatonPool(size)
    words = Words(pool)
    generator = torch.Generator().manual_seed(1)
    held: dict[int, list[int]] = {}
    for _ in range(400):
        which = int(torch.randint(8, (), generator=generator))
        if held.get(which) and int(torch.randint(2, (), generator=generator)):
            held[which].pop()
            pool.release(many[which])
        elif (begin := words.hold(many[which])) is not None:
            held.setdefault(which, []).append(begin)
        for number, begins in held.items():
            for begin in begins:
                tables = many[number].tables
                assert torch.equal(words.memory[begin : begin + len(tables)], tables)
    assert torch.equal(words.memory[:vocabulary_words], many[0].vocabulary.tables)
