"""Slots of adapters under every interleaving of the simulated device: each request has its own
adapter's tokens, and what lets go of a slot too early is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from photon_ext.engine.input import InputProcessor
from photon_ext.runtime import Pipeline, Row
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import Scheduler, Sequence
from photon_ext.scheduling.adapters import Adapter, AdapterSlots
from photon_ext.testing import (
    Chooser,
    Counterexample,
    Request,
    Scenario,
    SimError,
    SimRace,
    explore,
    replay,
    sample,
)
from tests.conftest import EXAMPLES
from tests.engine.stepped import TOY, Stepped, adapted

# prompt, cap, adapter; the second and third begin with the same page
ASKED = (
    ((1, 2, 3), 6, "1"),
    ((4, 5, 6, 7, 8), 4, "2"),
    ((4, 5, 6, 7, 8), 3, "3"),
    ((9,), 5, None),
    ((4, 5, 6, 7, 8, 9), 3, "2"),
)


def scenario(slots: int = 1, cancel_at: int = 3) -> Scenario:
    """Serves ASKED on three rows, and cancels the first at a turn, with steps in flight."""

    def run(chooser: Chooser) -> None:
        stepped = Stepped(2, 24, rows=3, max_len=16, slots=slots, chooser=chooser, graph=False)
        requests = [
            stepped.submit([*prompt], SamplingParams(cap), lora=name) for prompt, cap, name in ASKED
        ]
        turns = 0
        while stepped.turn():
            turns += 1
            if turns == cancel_at:
                requests[0].cancel()
            assert turns < 200
        for (prompt, cap, name), request in zip(ASKED, requests, strict=True):
            tokens = adapted(TOY, name).generate(Request(prompt, cap))
            output = request.result(0)
            assert output.error is None
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert output.token_ids == tokens or output.finish_reason == "cancelled"
        stepped.engine.close()

    return run


def finding(runs: int = 200) -> Exception:
    """What a bounded search finds of a planted bug, and finds again."""
    with pytest.raises(Counterexample) as found:
        sample(scenario(), runs)
    with pytest.raises(type(found.value.error)):
        replay(scenario(), found.value.choices)
    return found.value.error


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_i14_and_hazard_14_an_adapter_in_use_keeps_its_slot(slots: int) -> None:
    explore(scenario(slots), 40 * EXAMPLES)
    for cancel_at in range(1, 7):
        sample(scenario(slots, cancel_at), 8 * EXAMPLES, seed=cancel_at)


def test_a_slot_that_is_let_go_at_the_end_of_a_request_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step in flight still reads it: the row is released later."""
    finish, drop = Scheduler.finish, AdapterSlots.drop

    def early(self: Scheduler, sequence: Sequence) -> None:
        finish(self, sequence)
        if sequence.adapter is not None and sequence.row is not None:
            drop(self._adapters, sequence.adapter)

    monkeypatch.setattr(Scheduler, "finish", early)
    monkeypatch.setattr(AdapterSlots, "drop", lambda self, adapter: None)
    error = finding()
    assert isinstance(error, SimRace)
    assert "adapter 1" in str(error)


def test_a_slot_that_is_used_before_its_copy_is_done_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdapterSlots, "_arrived", lambda self, adapter, wait: True)
    assert isinstance(finding(), SimError)


def test_a_slot_that_nobody_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter leaves its slot while its request runs."""
    monkeypatch.setattr(AdapterSlots, "hold", lambda self, adapter: None)
    monkeypatch.setattr(AdapterSlots, "drop", lambda self, adapter: None)
    assert isinstance(finding(), (SimRace, AssertionError))


def planted_admit(change: Callable[[dict[str, Any]], object]) -> Callable[..., Row]:
    admit = Pipeline.admit

    def changed(self: Pipeline, *given: Any, **named: Any) -> Row:
        change(named)
        return admit(self, *given, **named)

    return changed


def test_a_row_with_another_adapter_is_found_by_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pipeline, "admit", planted_admit(lambda named: named.update(lora_slot=0)))
    assert isinstance(finding(), AssertionError)


def test_pages_that_do_not_know_their_adapter_are_found_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = InputProcessor.make

    def rootless(self: InputProcessor, *given: Any, **named: Any) -> Sequence:
        sequence = make(self, *given, **named)
        sequence.root = None
        return sequence

    monkeypatch.setattr(InputProcessor, "make", rootless)
    assert isinstance(finding(), AssertionError)


def test_hazard_15_an_adapter_of_the_same_name_is_another() -> None:
    stepped = Stepped(2, 24, slots=1)
    first = stepped.engine._adapters.find("1")
    stepped.engine.unload_lora("1")
    stepped.engine.load_lora("1", "2")
    second = stepped.engine._adapters.find("1")
    assert isinstance(first, Adapter)
    assert isinstance(second, Adapter)
    assert first.key != second.key
    stepped.engine.close()
