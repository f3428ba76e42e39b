"""What the simulated device counts, and what it flags as correct but slow."""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_ext.testing.clock import Actor
from photon_ext.testing.memory import Access

WORD = 4


@dataclass(slots=True)
class SimStats:
    """Counters since the runtime was made.

    Attributes:
        launches: forwards enqueued.
        blocking_waits: times the host blocked, or would have.
        copies_in, copies_out: copies enqueued.
        bytes_in, bytes_out: bytes of them.
        slow: what was correct and slow, one sentence each: an out-copy behind a later forward, a
            second blocking wait in a step (I7), words sent in a steady decode step.
    """

    launches: int = 0
    blocking_waits: int = 0
    copies_in: int = 0
    copies_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    slow: list[str] = field(default_factory=list)

    def copied_in(self, words: int) -> None:
        self.copies_in += 1
        self.bytes_in += words * WORD

    def copied_out(self, words: int) -> None:
        self.copies_out += 1
        self.bytes_out += words * WORD

    def extra_wait(self, what: str) -> None:
        self.slow.append(f"{what}: a step has one blocking wait, its commit's (I7)")

    def check_out_copy(self, access: Access, slot: int, launch: int) -> None:
        """Flags a copy that had to wait for compute work enqueued after its records were
        written.
        """
        behind = access.clock[Actor.COMPUTE] - access.last_write("records", slot)
        if behind > 0:
            self.slow.append(
                f"the out-copy of launch {launch} waits behind {behind} later actions of the "
                "compute stream"
            )

    def check_quiet(self, words: int, slot: int) -> None:
        """Flags words sent by a slot for which nothing changed."""
        if words:
            self.slow.append(
                f"slot {slot} sends {words} words in a steady decode step: nothing changed"
            )
