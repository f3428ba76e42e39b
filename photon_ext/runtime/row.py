"""A row in the pipeline: a lease, and how far its sequence has been launched and committed."""

from __future__ import annotations

import struct

from photon_ext.layout import HOST_MASK, ROW_COLUMNS, RowColumn
from photon_ext.runtime.admission import Admission
from photon_ext.runtime.lease import Lease


class Row:
    """One admitted sequence, as the pipeline sees it.

    Launched counts run ahead of committed ones by the steps in flight. ``sampled`` is an upper
    bound of what the device will produce: it stops early where the device sees a stop id.

    Attributes:
        lease: what the sequence holds.
        prompt_ids: the prompt.
        max_new_tokens: cap on sampled tokens.
        constrained: sampling waits for a host mask.
        prefilled: prompt tokens launched.
        sampled: tokens whose sampling was launched.
        committed: tokens delivered by commits.
        fault: what the row's mask callback raised, if it did.
    """

    __slots__ = (
        "committed",
        "constrained",
        "fault",
        "lease",
        "max_new_tokens",
        "prefilled",
        "prompt_ids",
        "sampled",
    )

    def __init__(
        self, lease: Lease, prompt_ids: tuple[int, ...], max_new_tokens: int, constrained: bool
    ) -> None:
        self.lease = lease
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.constrained = constrained
        self.prefilled = 0
        self.sampled = 0
        self.committed = 0
        self.fault: BaseException | None = None

    @property
    def index(self) -> int:
        """The row's index in the device tables."""
        return self.lease.row

    @property
    def generation(self) -> int:
        """Which of the leases that the row's index has had this one is; a step's record carries
        both.
        """
        return self.lease.generation

    @property
    def wants_prefill(self) -> bool:
        """Whether some of its prompt is not launched yet."""
        return self.lease.running and self.prefilled < len(self.prompt_ids)

    @property
    def wants_decode(self) -> bool:
        """Ready for one more decode token: steps in flight do not cover the cap yet, so none is
        launched in vain.
        """
        return self.lease.running and 0 < self.sampled < self.max_new_tokens

    @property
    def next_position(self) -> int:
        """KV position of the next token to launch."""
        return self.prefilled if self.sampled == 0 else len(self.prompt_ids) + self.sampled - 1

    def __repr__(self) -> str:
        return (
            f"Row({self.lease}, prefilled {self.prefilled}/{len(self.prompt_ids)}, sampled "
            f"{self.sampled}/{self.max_new_tokens})"
        )


def initial_state(generation: int, request: Admission) -> list[int]:
    """The row_state words of a sequence before its first step."""
    words = [0] * ROW_COLUMNS
    words[RowColumn.REMAINING] = request.max_new_tokens
    words[RowColumn.ALIVE] = 1
    words[RowColumn.GENERATION] = generation
    words[RowColumn.STOP_COUNT] = len(request.stop_ids)
    words[RowColumn.TEMPERATURE] = struct.unpack("<i", struct.pack("<f", request.temperature))[0]
    words[RowColumn.SEED_LOW], words[RowColumn.SEED_HIGH] = struct.unpack(
        "<ii", struct.pack("<Q", request.seed & (2**64 - 1))
    )
    words[RowColumn.CONSTRAINT] = HOST_MASK if request.constrained else 0
    return words
