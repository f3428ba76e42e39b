"""What the simulated device finds. Each error names the two parties and the memory they met at."""

from __future__ import annotations

from collections.abc import Sequence

from photon_ext.errors import PhotonError


class SimError(PhotonError, AssertionError):
    """The code under test broke a rule that a real device would not have told it about."""


class SimRace(SimError):
    """Two accesses to one range conflict, and nothing orders them."""


class SimPoison(SimError):
    """Memory was read that was released, consumed or never written."""


class SimOverwrite(SimError):
    """A result was overwritten before its reader came (I11)."""


class SimLeaseError(SimError):
    """A row was released twice, a page was given to two leases, or a sequence heard of itself
    after its end.
    """


class Counterexample(SimError):
    """A scenario failed under one interleaving.

    Attributes:
        error: what it raised.
        choices: the choices that lead there; ``replay(scenario, choices)`` runs them again.
        run: how many interleavings were run, this one included.
    """

    def __init__(self, error: Exception, choices: Sequence[int], run: int) -> None:
        super().__init__(
            f"interleaving {run} failed: {type(error).__name__}: {error}\nrun it again: "
            f"replay(scenario, {list(choices)})"
        )
        self.error = error
        self.choices = tuple(choices)
        self.run = run
