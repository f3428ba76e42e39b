"""An engine on the simulated device, whose model is the toy one: what tests of the loop run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from photon_ext.engine import Engine, EngineOptions, EngineParts
from photon_ext.runtime.ports import RuntimePort, StepSpec
from photon_ext.runtime.step import Forward
from photon_ext.testing import Chooser, Eager, Request, SimRuntime, ToyForward, ToyModel
from photon_ext.testing.slot import SimSlot
from tests.engine.byte_tokenizer import VOCAB


class WatchedDevice(SimRuntime):
    """A simulated device that is always done with what was enqueued, unless a chooser has it
    otherwise.

    Attributes:
        on_step: called at every launch, and may raise, to crash the engine's loop.
        finished: what its slots say they are.
    """

    def __init__(
        self,
        max_rows: int = 4,
        max_len: int = 64,
        depth: int = 2,
        page_size: int = 4,
        chooser: Chooser | None = None,
        step_tokens: int = 1,
        gives: Callable[[int, int], int] | None = None,
    ) -> None:
        super().__init__(
            max_rows,
            max_len,
            depth,
            page_size,
            chooser=chooser or Eager(),
            keeps_pages=True,
            max_biases=4,
            penalty_vocab=VOCAB,
            step_tokens=step_tokens,
            gives=gives,
        )
        self.on_step: Callable[[], None] = lambda: None
        self.finished = True

    @property
    def launches(self) -> int:
        """Steps launched."""
        return self.stats.launches

    def open_slots(self, spec: StepSpec) -> Sequence[SimSlot]:
        slots = super().open_slots(spec)
        for slot in slots:
            slot.launch = self._watched(slot.launch)  # type: ignore[method-assign]
            slot.done = lambda: self.finished  # type: ignore[method-assign]
        return slots

    def _watched(self, launch: Callable[..., int]) -> Callable[..., int]:
        def watched(*step: Any) -> int:
            self.on_step()
            return launch(*step)

        return watched


def engine_of(
    runtime: RuntimePort, forward: Forward, vocab_size: int, num_pages: int, **given: Any
) -> Engine:
    """An engine; `given`: fields of EngineParts and EngineOptions. By default prefill and decode
    steps take turns, as not every forward has room for both, and the collector is left alone.
    """
    names = {field.name for field in fields(EngineParts)}
    parts = {name: given.pop(name) for name in names & given.keys()}
    options = EngineOptions(**{"prefill": "separate", "freeze": False, **given})
    return Engine(EngineParts(runtime, forward, vocab_size, num_pages, **parts), options)


def engine_on(device: WatchedDevice, num_pages: int = 64, **options: Any) -> Engine:
    """An engine that serves the toy model on ``device``."""
    sizes = {"buckets": (1, 2), "chunk": 8}
    return engine_of(device, ToyForward(device, VOCAB), VOCAB, num_pages, **{**sizes, **options})


def expected_tokens(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """What the toy model generates greedily."""
    return list(ToyModel(vocab).generate(Request(tuple(prompt), count)))
