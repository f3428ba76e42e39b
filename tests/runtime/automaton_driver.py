"""A driver for requests with automata, on a pool that holds one of them besides the vocabulary."""

from __future__ import annotations

from photon_ext.runtime.row import Row
from photon_ext.scheduling.automaton_pool import AutomatonPool
from photon_ext.testing import Driver, Request
from photon_ext.testing.driver import Outcome
from tests.ops.automata import END, automaton, vocabulary

VOCABULARY = vocabulary(32)
MACHINES = {
    name: automaton(regex, VOCABULARY)
    for name, regex in (("abc", "(abc|ba|cc)+"), ("digits", "[0-9][0-9a-z]{2,4}[A-Z]"))
}
WORDS = len(VOCABULARY.tables) + max(len(machine.tables) for machine in MACHINES.values())


def asked(name: str, prompt_ids: tuple[int, ...], max_new_tokens: int = 6) -> Request:
    """A request with an automaton; its end token is a stop id, and no text of it is complete."""
    machine = MACHINES[name]

    def allowed(tokens: tuple[int, ...]) -> list[int]:
        words = machine.masks[machine.mask_of[machine.state_after(tokens)]]
        return [i for i in range(32) if words[i >> 5] >> (i & 31) & 1]

    request = Request(prompt_ids, max_new_tokens, allowed, constrained=False, stop_token_ids=(END,))
    _names[request] = name
    return request


_names: dict[Request, str] = {}


class AutomatonDriver(Driver):
    """Holds automata as the engine does, from admission to the release of the row. One request with
    another automaton waits until there is a place.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.pool = AutomatonPool(WORDS)
        self.most_resident = 0

    def automaton_of(self, request: Request) -> tuple[int, int]:
        if request not in _names:
            return 0, 0
        begin = self.pool.hold(MACHINES[_names[request]])
        assert begin is not None
        for write in self.pool.take_writes():
            self.pipeline.write_automaton(*write)
        self.most_resident = max(self.most_resident, self.pool.resident)
        return begin, 0

    def _fits(self, request: Request) -> bool:
        if request in _names and (begin := self.pool.hold(MACHINES[_names[request]])) is None:
            return False
        if request in _names:
            assert begin
            self.pool.release(MACHINES[_names[request]])
        return super()._fits(request)

    def on_release(self, row: Row) -> None:
        request = self._live[row.index, row.generation].request
        super().on_release(row)
        if request in _names:
            self.pool.release(MACHINES[_names[request]])


class EarlyRelease(AutomatonDriver):
    """Lets go of an automaton when its request is cancelled, while a step in flight may read it."""

    def cancel(self, outcome: Outcome) -> None:
        super().cancel(outcome)
        if outcome.row is not None and not outcome.released:
            self.pool.release(MACHINES[_names.pop(outcome.request)])
