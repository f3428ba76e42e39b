"""Where the host tells an observer what it is doing: the pipeline and the engine loop, on whatever
thread drives them. Off by default: then each call is one check of one module variable, `active`,
which `photon_ext.observe` sets.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from photon_ext.runtime.step import Step


class Phase(Enum):
    """What the host does for a step. Phases nest: a `wait` lies inside the engine's `commit`."""

    __hash__ = object.__hash__  # Enum's own is a Python call; the meter hashes some seven a turn

    ADMIT = "admit"  # takes waiting requests into rows
    PLAN = "plan"  # decides which rows are scheduled in the next step
    LAUNCH = "launch"
    WAIT = "wait"
    COMMIT = "commit"
    MASK = "mask"
    FINALIZE = "finalize"
    DELIVER = "deliver"
    DELAY = "delay"  # takes new requests, for as long as a launch is delayed
    COLLECT = "collect"  # takes new requests, and sleeps while there is nothing to do


class Probe(Protocol):
    """An observer; the functions below pass on to it."""

    def turn(self, phase: Phase | None) -> None:
        """The engine loop goes over to `phase` (None: to nothing); what is open here ends."""

    def begin(self, phase: Phase, step: int | None) -> None:
        """A phase begins on this thread, inside those that are open."""

    def end(self) -> None:
        """The innermost open phase of this thread ends."""

    def launched(self, step: Step, words: int) -> None:
        """`step` is enqueued, inside its `launch` phase; `words` int32 words go to the device."""

    def committed(self, step: Step, zombies: int) -> None:
        """`step` is read; `zombies` of its segments belong to sequences that had ended before."""


active: Probe | None = None


# Each reads `active` once: another thread may end the observation between a check and a call.


def turn(phase: Phase | None) -> None:
    if (observer := active) is not None:
        observer.turn(phase)


def begin(phase: Phase, step: int | None = None) -> None:
    if (observer := active) is not None:
        observer.begin(phase, step)


def end() -> None:
    if (observer := active) is not None:
        observer.end()


def launched(step: Step, words: int) -> None:
    if (observer := active) is not None:
        observer.launched(step, words)


def committed(step: Step, zombies: int) -> None:
    if (observer := active) is not None:
        observer.committed(step, zombies)
