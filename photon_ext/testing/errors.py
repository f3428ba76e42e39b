"""What the simulated device finds, and what can be planted for it to find. Each error names the two
parties and the memory they met at.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

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


class Fault(Enum):
    """A bug to plant in the device layer, below the pipeline. The last three are right but slow."""

    DROP_INPUT_WAIT = "the graph does not wait for the copy of its input"
    DROP_MASK_WAIT = "late sampling does not wait for the copy of its masks"
    DROP_OUTPUT_WAIT = "the out-copy does not wait for the step's outputs"
    COMMIT_WITHOUT_WAIT = "the host reads the records before they were copied out"
    STALE_DELTAS = "begin_step leaves the deltas in place, and a steady step applies them again"
    STAGED_REUSED = (
        "begin_step leaves staged tokens in place, and a slot whose segments did not "
        "change does not send new ones"
    )
    DELTAS_OFF_STREAM = (
        "row deltas are applied by the in-copy stream, beside the step that reads the rows"
    )
    AUTOMATON_OFF_STREAM = "an automaton is copied on a stream that no step waits for"
    STATE_KEPT = "publish_ leaves the states of automata as they are"

    LATE_OUT_COPY = "the out-copy is enqueued at the wait, behind the next forward"
    EXTRA_WAIT = "launch waits for its input copy"
    RESEND = "a steady decode step sends its segments again"
