"""A row: a live sequence's index in the device tables, what it holds there, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from photon_ext.checks import INT32_MAX
from photon_ext.errors import PipelineError

if TYPE_CHECKING:
    from photon_ext.row_params import RowParams

NEVER = -1  # the number of a step before the first


class RowState(Enum):
    """A row runs; or drains (tokens in flight are still delivered, none is launched); then it is
    finished (tokens in flight are skipped); and released once, when no step in flight uses it.
    """

    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    RELEASED = "released"


_NEXT = {
    RowState.RUNNING: (RowState.DRAINING, RowState.FINISHED),
    RowState.DRAINING: (RowState.FINISHED,),
    RowState.FINISHED: (RowState.RELEASED,),
    RowState.RELEASED: (),
}
_DELIVERS = (RowState.RUNNING, RowState.DRAINING)


class DecodeEpoch:
    """Counts decode steps for all rows that decode together, while rows join and leave.

    Attributes:
        launches: how many steps were launched.
        last_step: number of the latest of them; NEVER: none was.
        rows: how many rows decode in it.
    """

    __slots__ = ("last_step", "launches", "rows")

    def __init__(self) -> None:
        self.launches, self.last_step, self.rows = 0, NEVER, 0


@dataclass(slots=True, eq=False, repr=False)
class Row:
    """One admitted sequence, as the pipeline sees it. What it counts is launched, and so runs ahead
    of what is committed; while it decodes, its epoch counts the steps.

    Attributes:
        index: in the device tables, from 1 on.
        generation: which of the sequences that the index has had it is, from 1 on; a step's record
            carries both.
        pages: the KV pages, in order of position; more may be appended.
        prefilled: prompt tokens launched, or found in its first pages.
        fault: what the row's mask callback raised, if it did.
        epoch: where it decodes; None before the first step of it and after the last.
        capacity: KV entries that its pages hold; nothing is launched beyond.
        lora_slot: its adapter's slot, which is its own until it is released; 0: none.
        has_automaton: its constraint is an automaton on the device.
    """

    index: int
    generation: int
    pages: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    params: RowParams
    state: RowState = RowState.RUNNING
    prefilled: int = 0
    fault: BaseException | None = None
    epoch: DecodeEpoch | None = None
    capacity: int = INT32_MAX
    lora_slot: int = 0
    has_automaton: bool = False
    _sampled: int = 0
    _last_step: int = NEVER

    @property
    def running(self) -> bool:
        """Whether its sequence goes on."""
        return self.state is RowState.RUNNING

    @property
    def delivers(self) -> bool:
        """Whether tokens in flight are still delivered."""
        return self.state in _DELIVERS

    @property
    def sampled(self) -> int:
        """Tokens whose sampling was launched; the device may stop before, at a stop id."""
        return self._sampled + (0 if self.epoch is None else self.epoch.launches)

    @property
    def last_step(self) -> int:
        """Number of the latest step that uses it; NEVER: none did."""
        return self._last_step if self.epoch is None else max(self._last_step, self.epoch.last_step)

    @property
    def wants_prefill(self) -> bool:
        """Whether some of its prompt is not launched yet."""
        return self.running and self.prefilled < len(self.prompt_ids)

    @property
    def wants_decode(self) -> bool:
        """Ready for one more token: steps in flight do not cover the cap yet."""
        return self.running and 0 < self.sampled < self.params.max_new_tokens

    @property
    def next_position(self) -> int:
        """KV position of the next token to launch."""
        sampled = self.sampled
        return self.prefilled if sampled == 0 else len(self.prompt_ids) + sampled - 1

    def move(self, state: RowState) -> None:
        """The row goes over to another state. Raises PipelineError where it cannot."""
        if state not in _NEXT[self.state]:
            raise PipelineError(f"{self}: cannot become {state.value}")
        self.state = state

    def launch_chunk(self, step: int, tokens: int) -> None:
        """A step with so many tokens of its prompt was launched."""
        self.prefilled += tokens
        self._last_step = step
        if self.prefilled == len(self.prompt_ids):
            self._sampled = 1

    def join(self, epoch: DecodeEpoch | None) -> None:
        """Leaves its epoch, whose count it takes along, for another one, or for none."""
        sampled, last_step = self.sampled, self.last_step
        if self.epoch is not None:
            self.epoch.rows -= 1
        if epoch is not None:
            epoch.rows += 1
            sampled -= epoch.launches
        self._sampled, self._last_step, self.epoch = sampled, last_step, epoch

    def __repr__(self) -> str:
        return (
            f"Row({self.index}, generation {self.generation}, {self.state.value}, "
            f"prefilled {self.prefilled}/{len(self.prompt_ids)}, "
            f"sampled {self.sampled}/{self.params.max_new_tokens})"
        )
