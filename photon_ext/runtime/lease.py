"""The lease: what a live sequence holds on the device, and until when."""

from __future__ import annotations

from enum import Enum

from photon_ext.errors import PipelineError


class LeaseState(Enum):
    """A lease runs, is finalized (tokens still in flight are skipped), and is released once,
    when no step in flight uses it.
    """

    RUNNING = "running"
    FINALIZED = "finalized"
    RELEASED = "released"


class Lease:
    """One hold on (row, generation, pages), with the number of steps in flight that use it (I3,
    I4).

    A finalized lease with ``inflight_refs > 0`` is a zombie: its sequence has ended, its memory may
    still be read or written. The pipeline calls the methods; one out of order is a PipelineError.

    Attributes:
        row: index in the device tables, from 1 on.
        generation: which of the leases that this row has had it is, from 1 on.
        pages: the KV pages, numbered from 1 on.
        state: running, finalized or released.
        inflight_refs: steps launched and not yet committed that use it.
    """

    __slots__ = ("generation", "inflight_refs", "pages", "row", "state")

    def __init__(self, row: int, generation: int, pages: tuple[int, ...]) -> None:
        self.row = row
        self.generation = generation
        self.pages = pages
        self.state = LeaseState.RUNNING
        self.inflight_refs = 0

    @property
    def running(self) -> bool:
        """Whether its sequence goes on."""
        return self.state is LeaseState.RUNNING

    @property
    def zombie(self) -> bool:
        """Whether its sequence has ended, and a step in flight still uses it."""
        return self.state is LeaseState.FINALIZED and self.inflight_refs > 0

    @property
    def releasable(self) -> bool:
        """Whether its sequence has ended, nothing uses it any more, and it was not released yet."""
        return self.state is LeaseState.FINALIZED and self.inflight_refs == 0

    def retain(self) -> None:
        """A step that uses the lease was launched."""
        if self.state is not LeaseState.RUNNING:
            raise PipelineError(f"{self}: a {self.state.value} lease cannot be launched")
        self.inflight_refs += 1

    def drop(self) -> None:
        """A step that used the lease was committed."""
        if self.inflight_refs <= 0:
            raise PipelineError(f"{self}: dropped more often than it was launched")
        self.inflight_refs -= 1

    def finalize(self) -> None:
        """The sequence has ended; idempotent until release."""
        if self.state is LeaseState.RELEASED:
            raise PipelineError(f"{self}: finalized after its release")
        self.state = LeaseState.FINALIZED

    def release(self) -> None:
        """Gives row and pages back; exactly once, and never while a step in flight uses them."""
        if not self.releasable:
            raise PipelineError(
                f"{self}: released while {self.state.value} with {self.inflight_refs} steps in "
                "flight"
            )
        self.state = LeaseState.RELEASED

    def __repr__(self) -> str:
        return (
            f"Lease(row={self.row}, generation={self.generation}, {self.state.value}, "
            f"refs={self.inflight_refs})"
        )
