"""What the pipeline needs of the machine below it, be that CUDA, the host or simulated."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from photon_ext.runtime.row import Row
from photon_ext.runtime.row_table import RowTable
from photon_ext.runtime.step import Fill, Forward, Sample, Span, StepKey
from photon_ext.runtime.step_keys import StepKeys

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepSpec:
    """How steps are built, see Pipeline: fixed, so that every graph is captured at start-up.

    Attributes:
        keys: of the graphs; steps of other keys run eagerly.
        chunk: prompt tokens per step at most.
        graph: whether steps are captured at all.
        max_len: positions of a row at most.
    """

    forward: Forward
    sample: Sample | None
    vocab_size: int
    keys: StepKeys
    chunk: int
    graph: bool
    max_len: int


class SlotPort(Protocol):
    """One of the ping-pong slots. Every call but ``wait`` only enqueues."""

    def launch(
        self,
        key: StepKey,
        segments: array[int],
        staged: Sequence[int],
        deltas: Sequence[int],
        finish: bool,
        logprobs: bool = False,
        targets: Sequence[int] = (),
    ) -> int:
        """Stages what changed, replays the step's graph, and with ``finish`` enqueues the copy of
        its output records.

        Args:
            key: of the step.
            segments: int32 [R, 4]. The same object as at the slot's last launch has not changed.
            staged: ids of the chunks' tokens, in order; the first belongs to token
                ``key.decode_rows``.
            deltas: a packet of table words, or nothing.
            finish: False where sampling follows late.
            logprobs: a row of the step asks for log-probabilities.
            targets: of a scored step, the ids that follow its chunk tokens in their prompts;
                negative where they are not wanted.

        Returns the number of int32 words sent to the device; 0 in a steady decode step.
        """

    def write_mask(self, index: int, row: Row, position: int, fill: Fill) -> None:
        """Fills the mask of segment ``index`` and keys it for (row, position). What ``fill`` raises
        passes through; no key is set then.
        """

    def finalize(self, key: StepKey) -> None:
        """Sends the keys of all segments and the masks written since the launch, replays the
        sampling graph, enqueues the copy of the output records.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return at once, for counting only. Never blocks, never raises."""

    def wait(self, segments: int) -> memoryview:
        """Blocks until the step's output is on the host: int32 words as OutputLayout has them, as
        they are until the slot's next launch. Raises RuntimeError where device or worker failed.
        """

    @property
    def span(self) -> Span | None:
        """When the latest launch ran on the device; None without timing."""


class RuntimePort(Protocol):
    """A device with its row table; see Runtime."""

    depth: int
    max_len: int
    page_size: int
    table: RowTable
    captures_prefill: bool
    """Whether a prefill step of fewer tokens than its graph costs no more than its tokens."""

    step_tokens: int
    """Tokens that a decode row gets in a step at most; the kernels give one."""

    automaton_words: int

    def write_automaton(self, offset: int, words: torch.Tensor) -> None:
        """Writes int32 words among those of the automata (layout.AutomatonWord), where no row that
        a step in flight holds has any. They are there before the next launch that sends a row. On
        CUDA `words` is pinned, and kept until then.
        """

    def open_slots(self, spec: StepSpec) -> Sequence[SlotPort]:
        """Allocates and captures; one slot per step that may be in flight."""

    def upload(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """Enqueues a copy of host memory, on CUDA pinned, to device memory that no step in flight
        reads. A step launched later with prompt tokens finds it there.
        """
