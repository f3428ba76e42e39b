"""A simulated device for tests of decode loops: deterministic, every interleaving of streams and
host.

``SimRuntime`` takes the place of ``Runtime`` under the real Pipeline, Slot, RowTable and
StepProgram: what a step computes is computed by the CPU's ops and by your forward. Streams are
queues of closures, events carry clocks, memory is a set of named ranges whose accesses, known from
the schemas of the ops, are checked for races, and what was released, consumed or never written is
poison::

    def scenario(chooser):
        driver = Driver(SimRuntime(depth=2, chooser=chooser))
        request = Request((1, 2, 3), max_new_tokens=4)
        assert driver.run(request) == [ToyModel(32).generate(request)]

    print(explore(scenario))
"""

from photon_ext.testing.adapters import SimAdapters
from photon_ext.testing.chooser import Chooser, Eager, Lazy, Random, Scripted
from photon_ext.testing.device import SimDevice, SimEvent, SimStream
from photon_ext.testing.driver import Driver, Outcome
from photon_ext.testing.errors import (
    Counterexample,
    Fault,
    SimError,
    SimLeaseError,
    SimOverwrite,
    SimPoison,
    SimRace,
)
from photon_ext.testing.explore import Exploration, Scenario, explore, replay, sample
from photon_ext.testing.forward import ToyForward
from photon_ext.testing.invariants import check_invariants
from photon_ext.testing.model import Request, ToyModel
from photon_ext.testing.runtime import SimRuntime
from photon_ext.testing.stats import SimStats
from photon_ext.testing.stub import StubDevice

__all__ = [
    "Chooser",
    "Counterexample",
    "Driver",
    "Eager",
    "Exploration",
    "Fault",
    "Lazy",
    "Outcome",
    "Random",
    "Request",
    "Scenario",
    "Scripted",
    "SimAdapters",
    "SimDevice",
    "SimError",
    "SimEvent",
    "SimLeaseError",
    "SimOverwrite",
    "SimPoison",
    "SimRace",
    "SimRuntime",
    "SimStats",
    "SimStream",
    "StubDevice",
    "ToyForward",
    "ToyModel",
    "check_invariants",
    "explore",
    "replay",
    "sample",
]
