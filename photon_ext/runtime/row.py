"""A row: a live sequence's index in the device tables, what it holds there, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

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
        launches, commits: how many steps were launched, and how many of them are committed.
        last_step: number of the latest that was launched; NEVER: none was.
        rows: how many rows decode in it.
    """

    __slots__ = ("commits", "last_step", "launches", "rows")

    def __init__(self) -> None:
        self.launches, self.commits, self.last_step, self.rows = 0, 0, NEVER, 0


class _Stay(NamedTuple):
    """Launches of an epoch, from ``begin`` to ``end``, in which a row was."""

    epoch: DecodeEpoch
    begin: int
    end: int

    @property
    def committed(self) -> int:
        """How many of them are committed."""
        return min(max(self.epoch.commits, self.begin), self.end) - self.begin

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, eq=False, repr=False)
class Row:
    """One admitted sequence, as the pipeline sees it: what is committed of it, and what is launched
    at most. While it decodes, its epoch counts the steps, and a commit that gives it less than a
    step may give says so (`recount`).

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
        step_tokens: tokens that a decode step gives it at most.
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
    step_tokens: int = 1
    _launched: int = 0
    _committed: int = 0
    _last_step: int = NEVER
    _joined: int = 0
    _left: tuple[_Stay, ...] = ()

    @property
    def running(self) -> bool:
        """Whether its sequence goes on."""
        return self.state is RowState.RUNNING

    @property
    def delivers(self) -> bool:
        """Whether tokens in flight are still delivered."""
        return self.state in _DELIVERS

    @property
    def committed(self) -> int:
        """Tokens of its answer that are committed, while they are delivered."""
        steps = sum(stay.committed for stay in self._left)
        if self.epoch is not None:
            steps += _Stay(self.epoch, self._joined, self.epoch.launches).committed
        return self._committed + steps * self.step_tokens

    @property
    def launched(self) -> int:
        """Tokens whose sampling was launched, at most; the device may stop before, at a stop id."""
        epoch = self.epoch
        return self._launched + (0 if epoch is None else epoch.launches * self.step_tokens)

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
        return self.running and 0 < self.launched < self.params.max_new_tokens

    @property
    def next_position(self) -> int:
        """KV position of the next token to launch, at most."""
        launched = self.launched
        return self.prefilled if launched == 0 else len(self.prompt_ids) + launched - 1

    @property
    def mask_position(self) -> int:
        """KV position of the token behind which it is sampled next, once all before is committed:
        what a mask of the host is written for.
        """
        return len(self.prompt_ids) + self.committed - 1

    @property
    def steps_left(self) -> int:
        """Decode steps to launch until its cap is covered, or its pages may be full."""
        left = self.params.max_new_tokens - self.launched
        entries = self.capacity - self.next_position
        return -(-left // self.step_tokens) if entries >= left else entries // self.step_tokens

    def move(self, state: RowState) -> None:
        """The row goes over to another state. Raises PipelineError where it cannot."""
        if state not in _NEXT[self.state]:
            raise PipelineError(f"{self}: cannot become {state.value}")
        self.state = state

    def launch_chunk(self, step: int, tokens: int) -> None:
        """A step with `tokens` tokens of its prompt was launched."""
        self.prefilled += tokens
        self._last_step = step
        if self.prefilled == len(self.prompt_ids):
            self._launched = 1

    def commit_first(self) -> None:
        """The step that ends its prompt was committed, and gave it a token."""
        self._committed = 1

    def recount(self, tokens: int) -> None:
        """A decode step was committed that gave it `tokens`, fewer than it may give."""
        self._committed += tokens - self.step_tokens
        self._launched += tokens - self.step_tokens

    def join(self, epoch: DecodeEpoch | None) -> None:
        """Leaves its epoch, whose counts it takes along, for another one, or for none."""
        launched, last_step, left = self.launched, self.last_step, self._left
        if self.epoch is not None:
            self.epoch.rows -= 1
            left = (*left, _Stay(self.epoch, self._joined, self.epoch.launches))
        if epoch is not None:
            epoch.rows += 1
            launched -= epoch.launches * self.step_tokens
            self._joined = epoch.launches
        steps = sum(stay.committed for stay in left if stay.committed == stay.length)
        self._committed += steps * self.step_tokens
        self._left = tuple(stay for stay in left if stay.committed < stay.length)
        self._launched, self._last_step, self.epoch = launched, last_step, epoch

    def __repr__(self) -> str:
        return (
            f"Row({self.index}, generation {self.generation}, {self.state.value}, "
            f"prefilled {self.prefilled}/{len(self.prompt_ids)}, "
            f"launched {self.launched}/{self.params.max_new_tokens})"
        )
