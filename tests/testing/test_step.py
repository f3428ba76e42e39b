"""What a simulated step is: the ops of a real one, whose accesses are known from their schemas."""

from __future__ import annotations

import pytest
import torch

from photon_ext import ops
from photon_ext.layout import NO_PAGE
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import KernelPlan
from photon_ext.models.weights import random_weights
from photon_ext.runtime import Pipeline, RowParams, Runtime
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import FinishReason, StepTensors
from photon_ext.testing import (
    Chooser,
    Driver,
    Eager,
    Random,
    Request,
    SimPoison,
    SimRace,
    SimRuntime,
    ToyForward,
    ToyModel,
    sample,
)
from photon_ext.testing.clock import Actor
from photon_ext.testing.footprint import Footprint
from photon_ext.testing.memory import Access, Memory
from photon_ext.testing.state import DeviceState

CONFIG = ModelConfig(Family.QWEN3, 32, 2, 2, 1, 16, 40, 61)
PAGE, MAX_LEN, ROWS, PAGES = 4, 24, 2, 12
WEIGHTS = random_weights(CONFIG, torch.float32)
ASKED = (
    Request((1, 2, 3, 4, 5, 6, 7), 9),
    Request((8, 9), 5, allowed=lambda tokens: {len(tokens), 50}),
    Request((3,) * 10, 6, temperature=0.9, seed=7),
)


def decoder() -> Decoder:
    return Decoder(CONFIG, WEIGHTS, 8, ROWS, MAX_LEN, PAGE, PAGES, plan=KernelPlan())


def driver_of(runtime: SimRuntime | Runtime, model: Decoder) -> Driver:
    return Driver(
        runtime, pages=PAGES, forward=model.forward, vocab_size=CONFIG.vocab, chunk=8, graph=False
    )


def simulated(chooser: Chooser) -> tuple[SimRuntime, Driver]:
    runtime, model = SimRuntime(ROWS, MAX_LEN, page_size=PAGE, chooser=chooser), decoder()
    for cache in (*model._kv.keys, *model._kv.values):
        runtime.watch_pages(cache)
    return runtime, driver_of(runtime, model)


def test_a_model_serves_the_same_tokens_under_any_interleaving_as_on_the_real_runtime() -> None:
    real = Runtime(max_rows=ROWS, max_len=MAX_LEN, device="cpu", page_size=PAGE)
    expected = driver_of(real, decoder()).run(*ASKED)
    assert [len(tokens) for tokens in expected] == [9, 5, 6]

    def scenario(chooser: Chooser) -> None:
        runtime, driver = simulated(chooser)
        assert driver.run(*ASKED) == expected
        assert runtime.stats.slow == []
        assert not runtime.state.pages

    sample(scenario, 10)


def test_a_model_that_reads_a_released_page_gets_no_number() -> None:
    runtime, driver = simulated(Random(1))
    outcome = driver.submit(ASKED[0])
    while len(outcome.tokens) < 3:
        driver.tick()
    assert outcome.row is not None
    runtime.state.poison_page(outcome.row.pages[0])
    while driver.busy:
        driver.tick()
    assert (outcome.finish, len(outcome.tokens) < 9) == (FinishReason.ERROR, True)
    assert "all of its logits are NaN" in str(outcome.error)


@pytest.mark.parametrize(("page", "races"), [(1, True), (5, True), (6, False)])
def test_the_pages_of_a_step_are_the_contexts_of_its_tokens(page: int, races: bool) -> None:
    """A host that writes one of them while the step may run is a race; another page is nobody's."""
    runtime = SimRuntime(ROWS, MAX_LEN, page_size=PAGE, chooser=Eager())
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32)
    pipe.admit(tuple(range(6)), RowParams(2), pages=(1, 5, 6))
    pipe.launch()
    runtime.device.host_point()
    if races:
        with pytest.raises(SimRace, match=f"writes page {page} while 'step 0' (reads|writes) it"):
            runtime.device.host_write("the host", "page", page)
    else:
        runtime.device.host_write("the host", "page", page)


def test_a_row_without_a_page_where_it_writes_is_found() -> None:
    runtime = SimRuntime(ROWS, MAX_LEN, page_size=PAGE)
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32)
    row = pipe.admit((1, 2, 3), RowParams(6), pages=(1, 2))
    for _ in range(2):  # the first step, with the deltas, has run then
        pipe.tick()
    runtime.state.tables.page_table[row.index, 1] = NO_PAGE
    with pytest.raises(SimPoison, match="row 1 has no page at position 4"):
        pipe.tick()


def test_a_custom_sample_is_what_the_simulated_device_runs() -> None:
    def always_seven(step: StepTensors) -> None:
        step.sampled.fill_(7)

    runtime = SimRuntime()
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32, sample=always_seven, graph=False)
    pipe.admit((1, 2), RowParams(3))
    events = []
    while pipe.busy:
        events += pipe.tick()
    assert [event.tokens for event in events] == [(7,)] * 3


def test_the_toy_model_with_another_seed_is_another_model() -> None:
    runtime = SimRuntime()
    driver = Driver(runtime, forward=ToyForward(runtime, seed=3))
    request = Request((1, 2, 3), 6)
    assert driver.run(request) == [ToyModel(32, seed=3).generate(request)]
    assert driver.outcomes[0].tokens != list(ToyModel(32).generate(request))


class Ledger(Memory):
    """Notes accesses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def read(self, name: tuple, *_: object) -> None:
        self.seen.add(("reads", name[0]))

    def write(self, name: tuple, *_: object) -> None:
        self.seen.add(("writes", name[0]))


def test_accesses_are_those_of_the_schema_lists_and_keywords_included() -> None:
    out, z, x, y = torch.zeros(1, 4), torch.zeros(2, 4), torch.ones(2, 4), torch.ones(2, 4)
    segments = torch.tensor([[1, 0, 2, 1]], dtype=torch.int32)
    names = {
        tensor.untyped_storage().data_ptr(): (name,)
        for name, tensor in {"out": out, "z": z, "x": x, "y": y, "segments": segments}.items()
    }
    ledger = Ledger()
    access = Access(ledger, Actor.COMPUTE, (0, 1, 0, 0, 0), "test")

    def seen() -> set[tuple[str, str]]:
        found, ledger.seen = ledger.seen, set()
        return found

    with Footprint(names, DeviceState(RowTable(1, 1, 1), 4)).of(access) as footprint:
        ops.select_tokens_into(out, x, segments)
        assert seen() == {("writes", "out"), ("reads", "x"), ("reads", "segments")}
        footprint.of(access)
        torch.cat([x[:1], y[1:]], out=z)
        assert seen() == {("reads", "x"), ("reads", "y"), ("writes", "z")}
        footprint.of(access)
        x[0].view(-1)
        assert seen() == set(), "a view touches no memory"
        x.add_(1)
        assert seen() == {("writes", "x")}
