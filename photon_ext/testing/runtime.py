"""The simulated runtime: a RuntimePort on which the real Pipeline, Slot, RowTable and StepProgram
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from photon_ext.checks import check_capacity
from photon_ext.errors import ConfigError
from photon_ext.layout import InputLayout, MaskLayout
from photon_ext.runtime.ports import StepSpec
from photon_ext.runtime.row_table import RowTable
from photon_ext.testing.chooser import Chooser, Lazy
from photon_ext.testing.decode_slot import PinnedWords, SimDecodeSlot, SimGraphs
from photon_ext.testing.device import SimDevice
from photon_ext.testing.errors import Fault
from photon_ext.testing.memory import Access
from photon_ext.testing.row_table import SimRowTable
from photon_ext.testing.slot import SimSlot
from photon_ext.testing.state import SlotState
from photon_ext.testing.stats import SimStats
from photon_ext.testing.step import SimStep


class SimRuntime:
    """A device for tests: the same pipeline, the CPU's ops, every interleaving.

    A step runs the ``forward`` and ``sample`` that the Pipeline was made with when the simulated
    compute stream comes to it, eagerly, also where the Pipeline asks for graphs. ``ToyForward`` is
    a forward in which one wrong KV entry changes the tokens.

    Args:
        max_rows: sequences that can be live at once.
        max_len: tokens a sequence can hold.
        depth: steps in flight: 1 or 2.
        page_size: tokens per KV page; None is one page per row.
        max_stop_ids: stop ids a row can have.
        max_biases, penalty_vocab, automaton_words: see Runtime.
        chooser: decides how far the device gets between the host's calls; None: no further than it
            must.
        fault: a bug to plant.
        check_races: report unordered accesses; False leaves it to the values to show what went
            wrong.
        keeps_pages: pages that nobody holds keep what they hold until they are given to a row anew,
            as a prefix cache needs it; else they are poison from the release on.
        step_tokens: tokens that a decode row gets in a step at most.
        gives: called with the number of a launch and a row's index: how many tokens the row gets,
            from 0 to ``step_tokens``. None: as many as it may.

    Attributes:
        stats: what was launched, copied and waited for, and what was slow.
        device: the streams and the memory; `device.trace` tells what ran.
        state: the tables and the watched pages.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        max_rows: int = 4,
        max_len: int = 64,
        depth: int = 2,
        page_size: int | None = None,
        max_stop_ids: int = 4,
        *,
        max_biases: int = 0,
        penalty_vocab: int = 0,
        automaton_words: int = 0,
        chooser: Chooser | None = None,
        fault: Fault | None = None,
        check_races: bool = True,
        keeps_pages: bool = False,
        step_tokens: int = 1,
        gives: Callable[[int, int], int] | None = None,
    ) -> None:
        capacity = check_capacity(max_rows, max_len, depth, page_size, max_stop_ids)
        self.depth = capacity.depth
        self.captures_prefill = True
        self.step_tokens = step_tokens
        self.max_len = capacity.max_len
        self.page_size = capacity.page_size
        self.stats = SimStats()
        self.device = SimDevice(chooser if chooser is not None else Lazy(), check_races)
        table = SimRowTable(
            self.device,
            capacity.max_rows,
            capacity.pages_per_row,
            capacity.max_stop_ids,
            capacity.page_size,
            keeps_pages,
            max_biases,
            penalty_vocab,
        )
        self.state = table.state
        self.state.gives = gives
        self.table: RowTable = table
        self.automaton_words = automaton_words
        self._fault = fault

    def write_automaton(self, offset: int, words: torch.Tensor) -> None:
        """See RuntimePort.write_automaton."""
        words = words.clone()

        def copy(access: Access) -> None:
            self.state.write_automaton(offset, words, access)

        streams = self.device
        unordered = self._fault is Fault.AUTOMATON_OFF_STREAM
        (streams.out_copy if unordered else streams.in_copy).enqueue(
            f"copy automaton {offset}", copy
        )

    def watch_pages(self, memory: torch.Tensor) -> None:
        """Watches a forward's KV memory: what nobody has written since the release of its page is
        poison, and accesses by ops count as those of the pages that the step's tokens have.

        Args:
            memory: on the CPU; the first dimension counts pages. Its content is lost.

        Raises:
            ConfigError: it is elsewhere, or has no dimension.
        """
        self.state.watch_pages(memory)

    def open_slots(self, spec: StepSpec) -> Sequence[SimSlot]:
        """See RuntimePort.open_slots."""
        if self.state.shared is not None:
            raise ConfigError(
                "this SimRuntime already serves a Pipeline; make another for another Pipeline"
            )
        rows, segments = spec.keys.max_rows, spec.keys.max_segments
        inputs = InputLayout(
            segments, rows + spec.chunk, self.table.delta_capacity, self.step_tokens
        )
        masks = MaskLayout(segments, spec.vocab_size)
        self.state.open(inputs.max_step_tokens, segments, self.automaton_words)
        natives: list[SimDecodeSlot] = []
        graphs = SimGraphs(frozenset(spec.keys.all() if spec.graph else ()), natives)
        return [
            self._open_slot(index, spec, inputs, masks, graphs, natives)
            for index in range(self.depth)
        ]

    def upload(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """See RuntimePort.upload; at once."""
        to.copy_(rows)

    def synchronize(self) -> None:
        """Waits for everything that was enqueued.

        No step needs it: it counts as a blocking wait, and is flagged.
        """
        self.stats.blocking_waits += 1
        self.stats.extra_wait("synchronize was called")
        self.device.synchronize()

    def _open_slot(
        self,
        index: int,
        spec: StepSpec,
        inputs: InputLayout,
        masks: MaskLayout,
        graphs: SimGraphs,
        natives: list[SimDecodeSlot],
    ) -> SimSlot:
        state = SlotState(index, inputs, masks)
        step = SimStep(index, spec, self.state, state, inputs, masks, self._fault)
        pinned = (
            PinnedWords(self.device, "pinned input", index, inputs.words),
            PinnedWords(self.device, "pinned output", index, inputs.outputs.capacity),
            PinnedWords(
                self.device,
                "pinned mask",
                index,
                masks.capacity,
                hands_out="write",
            ),
        )
        native = SimDecodeSlot(index, self.device, state, step, pinned, self.stats, self._fault)
        natives.append(native)
        return SimSlot(
            index, self.device, native, graphs, pinned, inputs, masks, self.stats, self._fault
        )
